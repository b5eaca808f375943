//! What results are made of: pictures as pictures, other files as links, and the URIs that lead to them.
#![forbid(unsafe_code)]

use std::io::Read;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rmcp::model::{ContentBlock, Resource};

use super::place::{Fault, Place};
use crate::objects::{FileRecord, Objects};

const SCHEME: &str = "caisson://";
const OWN: &str = "files/";
const NAMED: &str = "sessions/";
/// What RFC 3986 lets stand in a segment of a path, less what has a meaning of its own.
const SEGMENT: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_').remove(b'~').remove(b':').remove(b'@');
/// Largest picture that is shown, in bytes; models take no larger ones.
pub(super) const PICTURE_BYTES_MAX: u64 = 5 * 1024 * 1024;
/// Of all pictures of one result.
pub(super) const PICTURES_BYTES_MAX: u64 = 15 * 1024 * 1024;
pub(super) const PICTURES_MAX: usize = 20;
/// Bytes that tell what kind of picture a file is.
pub(super) const MAGIC_BYTES: usize = 12;
/// Largest drawing that is embedded as its text.
const DRAWING_BYTES_MAX: u64 = 256 * 1024;
const DRAWING: &str = "image/svg+xml";

/// `caisson://files/plot.png` in the connection's session, `caisson://sessions/NAME/files/plot.png` in a named one.
pub(super) fn uri(session: Option<&str>, path: &str) -> String {
    let segments: Vec<String> =
        path.split('/').map(|segment| utf8_percent_encode(segment, SEGMENT).to_string()).collect();
    let path = segments.join("/");
    match session {
        None => format!("{SCHEME}{OWN}{path}"),
        Some(name) => format!("{SCHEME}{NAMED}{}/{OWN}{path}", utf8_percent_encode(name, SEGMENT)),
    }
}

/// Session and path of such a URI.
pub(super) fn read_uri(uri: &str) -> Option<(Option<String>, String)> {
    let decode = |text: &str| percent_decode_str(text).decode_utf8().ok().map(std::borrow::Cow::into_owned);
    let rest = uri.strip_prefix(SCHEME)?;
    let (session, path) = match rest.strip_prefix(NAMED) {
        None => (None, rest.strip_prefix(OWN)?),
        Some(rest) => {
            let (name, rest) = rest.split_once('/')?;
            (Some(decode(name)?), rest.strip_prefix(OWN)?)
        }
    };
    Some((session, decode(path).filter(|path| !path.is_empty())?))
}

/// The kind of picture that these first bytes begin. Names lie, and a client that is told a wrong kind breaks.
pub(super) fn picture(first: &[u8]) -> Option<&'static str> {
    match first {
        [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}

pub(super) fn link(place: &Place, record: &FileRecord) -> Resource {
    Resource::new(uri(place.name.as_deref(), &record.name), record.name.clone())
        .with_mime_type(record.content_type.clone())
        .with_size(record.size)
}

/// Reads part of a stored file, on a thread that may wait.
pub(super) async fn read(
    objects: &Objects,
    record: &FileRecord,
    offset: u64,
    bytes_max: u64,
) -> Result<Vec<u8>, Fault> {
    let (objects, record) = (objects.clone(), record.clone());
    let reading = tokio::task::spawn_blocking(move || {
        use std::io::Seek;
        let mut file = objects.read(&record)?;
        file.seek(std::io::SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.take(bytes_max).read_to_end(&mut bytes)?;
        Ok::<_, std::io::Error>(bytes)
    });
    match reading.await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => {
            tracing::error!(%error, "a stored file cannot be read");
            Err(Fault::new("the file cannot be read at the moment"))
        }
        Err(_) => Err(Fault::new("the file cannot be read at the moment")),
    }
}

/// Pictures as far as they fit, links to everything.
pub(super) async fn blocks(place: &Place, records: &[&FileRecord]) -> Vec<ContentBlock> {
    let objects = place.runs.objects();
    let (mut shown, mut links) = (Vec::new(), Vec::new());
    let mut left = PICTURES_BYTES_MAX;
    for record in records {
        links.push(ContentBlock::resource_link(link(place, record)));
        if shown.len() >= PICTURES_MAX || record.size > left.min(PICTURE_BYTES_MAX) {
            continue;
        }
        let Ok(first) = read(objects, record, 0, MAGIC_BYTES as u64).await else { continue };
        if let Some(kind) = picture(&first) {
            let Ok(bytes) = read(objects, record, 0, PICTURE_BYTES_MAX).await else { continue };
            left = left.saturating_sub(bytes.len() as u64);
            shown.push(ContentBlock::image(STANDARD.encode(bytes), kind));
        } else if record.content_type == DRAWING && record.size <= DRAWING_BYTES_MAX {
            let Ok(bytes) = read(objects, record, 0, DRAWING_BYTES_MAX).await else { continue };
            if let Ok(text) = String::from_utf8(bytes) {
                left = left.saturating_sub(text.len() as u64);
                shown.push(ContentBlock::resource(text_of(place, record, text)));
            }
        }
    }
    shown.extend(links);
    shown
}

fn text_of(place: &Place, record: &FileRecord, text: String) -> rmcp::model::ResourceContents {
    let uri = uri(place.name.as_deref(), &record.name);
    rmcp::model::ResourceContents::text(text, uri).with_mime_type(record.content_type.clone())
}

/// The newest file of each name, in the order of names.
pub(super) async fn newest(place: &Place) -> Vec<Arc<FileRecord>> {
    let mut newest = std::collections::BTreeMap::new();
    for record in place.runs.objects().live_files_of(&place.session.id).await {
        newest.insert(record.name.clone(), Arc::new(record));
    }
    newest.into_values().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn uris_lead_back_to_their_file() {
        assert_eq!(uri(None, "a b/ü?.png"), "caisson://files/a%20b/%C3%BC%3F.png");
        assert_eq!(uri(Some("chat:1"), "x"), "caisson://sessions/chat:1/files/x");
        for wrong in [
            "",
            "file:///etc/passwd",
            "caisson://files/",
            "caisson://sessions/a/x",
            "caisson://x",
            "caisson://files/%ff",
        ] {
            assert_eq!(read_uri(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_picture_is_known_by_its_bytes_and_not_by_its_name() {
        assert_eq!(picture(b"\x89PNG\r\n\x1a\n...."), Some("image/png"));
        assert_eq!(picture(b"\xff\xd8\xff\xe0"), Some("image/jpeg"));
        assert_eq!(picture(b"GIF89a"), Some("image/gif"));
        assert_eq!(picture(b"RIFF\0\0\0\0WEBP"), Some("image/webp"));
        for other in [&b""[..], b"<svg", b"RIFF\0\0\0\0WAVE", b"PNG"] {
            assert_eq!(picture(other), None);
        }
    }

    proptest! {
        #[test]
        fn every_name_has_a_uri(path in "[^/\\p{Cc}]{1,20}(/[^/\\p{Cc}]{1,20}){0,3}", name in proptest::option::of("[A-Za-z0-9._:@-]{1,20}")) {
            let uri = uri(name.as_deref(), &path);
            prop_assert!(uri.is_ascii());
            prop_assert_eq!(read_uri(&uri), Some((name, path)));
        }
    }
}
