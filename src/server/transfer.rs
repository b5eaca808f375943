//! Files on their way out, for every family: their headers, and bodies that are given up when nobody reads them.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt, try_unfold, unfold};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::sync::mpsc;
use tracing::Instrument;

/// What RFC 8187 lets stand in a name as it is.
const NAME_CHARACTERS: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_').remove(b'~');
/// Bytes of a file that are read at once.
const PIECE_BYTES: usize = 256 * 1024;

/// Headers of everything that a guest has made and a browser might open.
pub(crate) fn attachment(response: &mut Response, disposition: &str, content_type: &str) {
    set(response, header::CONTENT_TYPE, content_type);
    set(response, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(response, header::CONTENT_SECURITY_POLICY, "sandbox");
    set(response, header::CONTENT_DISPOSITION, disposition);
}

/// `attachment; filename="plot.png"`, and the whole name in a second form where the first cannot hold it.
pub(crate) fn disposition(name: &str) -> String {
    let plain: String = name
        .chars()
        .map(|character| match character {
            '"' | '\\' | '%' => '_',
            ' '..='~' => character,
            _ => '_',
        })
        .collect();
    if plain == name {
        return format!("attachment; filename=\"{plain}\"");
    }
    let whole = utf8_percent_encode(name, NAME_CHARACTERS);
    format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{whole}")
}

/// The same for clients that read the second form only.
pub(crate) fn extended_disposition(name: &str) -> String {
    format!("attachment; filename*=UTF-8''{}", utf8_percent_encode(name, NAME_CHARACTERS))
}

pub(crate) fn set(response: &mut Response, name: HeaderName, value: &str) {
    let value = HeaderValue::from_str(value).expect("what is set here is visible ASCII");
    response.headers_mut().insert(name, value);
}

/// A body that is given up, with all that it holds, once its caller has read nothing for `idle_max`. Two pieces are
/// held at most.
pub(crate) fn paced(
    pieces: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    idle_max: Duration,
) -> Body {
    let (sender, receiver) = mpsc::channel(1);
    let is_whole = Arc::new(AtomicBool::new(false));
    let sent_whole = Arc::clone(&is_whole);
    let sending = async move {
        let mut pieces = pin!(pieces);
        while let Some(piece) = pieces.next().await {
            let is_last = piece.is_err();
            match tokio::time::timeout(idle_max, sender.send(piece)).await {
                Ok(Ok(())) if !is_last => {}
                Ok(_) => return,
                Err(_) => {
                    tracing::info!("a transfer is given up: its caller reads no further");
                    return;
                }
            }
        }
        is_whole.store(true, Ordering::Release);
    };
    tokio::spawn(sending.in_current_span());
    Body::from_stream(unfold(Some(receiver), move |receiver| {
        let sent_whole = Arc::clone(&sent_whole);
        async move {
            let mut receiver = receiver?;
            match receiver.recv().await {
                Some(piece) => Some((piece, Some(receiver))),
                None if sent_whole.load(Ordering::Acquire) => None,
                // Without an error the end of a part would pass for the end of the whole.
                None => Some((Err(std::io::Error::from(std::io::ErrorKind::TimedOut)), None)),
            }
        }
    }))
}

/// The whole of a file that nobody changes, `bytes` long.
pub(crate) fn whole(file: File, bytes: u64, idle_max: Duration) -> Body {
    let file = Arc::new(file);
    let pieces = try_unfold((file, 0), move |(file, at): (Arc<File>, u64)| async move {
        let wanted = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(PIECE_BYTES);
        if wanted == 0 {
            return Ok(None);
        }
        let source = Arc::clone(&file);
        // A disk can keep a reader waiting, and the runtime's threads serve everybody.
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0_u8; wanted];
            source.read_exact_at(&mut piece, at)?;
            Ok::<_, std::io::Error>(Bytes::from(piece))
        });
        let piece: Bytes = read.await.map_err(std::io::Error::other)??;
        let next = at + piece.len() as u64;
        Ok::<_, std::io::Error>(Some((piece, (file, next))))
    });
    paced(pieces, idle_max)
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[test]
    fn a_name_cannot_break_out_of_its_header() {
        assert_eq!(disposition("plot.png"), "attachment; filename=\"plot.png\"");
        assert_eq!(
            disposition("a\"\r\nX: y.txt"),
            "attachment; filename=\"a___X: y.txt\"; filename*=UTF-8''a%22%0D%0AX%3A%20y.txt"
        );
        assert_eq!(disposition("größe"), "attachment; filename=\"gr__e\"; filename*=UTF-8''gr%C3%B6%C3%9Fe");
    }

    #[tokio::test]
    async fn a_body_comes_whole_and_one_that_nobody_reads_is_given_up() {
        let pieces = |count| {
            let dropped = Arc::new(());
            let held = Arc::downgrade(&dropped);
            let stream = unfold((0, dropped), move |(at, dropped)| async move {
                (at < count).then(|| (Ok(Bytes::from_static(b"piece")), (at + 1, dropped)))
            });
            (stream, held)
        };
        let body = paced(pieces(3).0, Duration::from_secs(60));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "piecepiecepiece");

        let (stream, held) = pieces(1_000);
        let mut body = paced(stream, Duration::from_millis(20));
        assert!(body.frame().await.unwrap().is_ok());
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(held.strong_count(), 0, "what it held is free");
        let mut last = Ok(0);
        while let Some(frame) = body.frame().await {
            last = frame.map(|_| 0);
        }
        assert!(last.is_err(), "and it does not end as if it were whole");
    }

    #[tokio::test]
    async fn a_file_comes_whole_and_one_that_is_shorter_than_promised_does_not_end() {
        let bytes: Vec<u8> = (0..PIECE_BYTES as u32 + 7).map(|at| at as u8).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, &bytes).unwrap();
        let open = || File::open(&path).unwrap();
        let body = whole(open(), bytes.len() as u64, Duration::from_secs(60));
        assert!(body.collect().await.unwrap().to_bytes() == bytes);
        assert_eq!(whole(open(), 0, Duration::from_secs(60)).collect().await.unwrap().to_bytes(), "");
        let longer = whole(open(), bytes.len() as u64 + 1, Duration::from_secs(60));
        assert!(longer.collect().await.is_err());
    }
}
