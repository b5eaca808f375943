//! `multipart/form-data`, read part by part as it comes, whatever its size: what is held at once is a piece of one part.
//!
//! Written here because names are kept as they were sent. A general parser refuses a part whose name has a control
//! character or no UTF-8, loses one that is given as `filename*`, and gathers without bound what has no end of its
//! own: the text before the first part, and a part's head.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use memchr::memmem::{self, Finder};
use percent_encoding::percent_decode_str;

/// Longest boundary (RFC 2046).
const BOUNDARY_BYTES_MAX: usize = 70;
/// Most that may stand before the first part.
const PREAMBLE_BYTES_MAX: usize = 16 * 1024;
/// Most that is read behind the last.
const EPILOGUE_BYTES_MAX: usize = 16 * 1024;
/// Largest head of a part.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// How long a form may stand still.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// Why a form was not read.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unread {
    #[error("Request body is not multipart/form-data with a boundary")]
    NotAForm,
    #[error("Request body ends within the form, or is none")]
    Broken,
    #[error("Request payload is too large")]
    TooLarge,
    #[error("Request body did not arrive in time")]
    TooSlow,
}

/// A form on its way in.
pub(crate) struct Form {
    body: Body,
    /// Finds a line break and the boundary.
    delimiter: Finder<'static>,
    buffer: BytesMut,
    at: At,
    /// Bytes read, and the most that may be.
    seen: u64,
    bytes_max: u64,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum At {
    Preamble,
    /// Behind a boundary.
    Head,
    Content,
    End,
}

/// The head of a part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    /// Empty when it has none.
    pub(crate) name: String,
    /// Present for a file, even when empty.
    pub(crate) file_name: Option<String>,
    pub(crate) content_type: Option<String>,
}

impl Form {
    /// The form of a request whose body has at most `bytes_max`.
    pub(crate) fn of(request: Request, bytes_max: u64) -> Result<Form, Unread> {
        let content_type = request.headers().get(header::CONTENT_TYPE).ok_or(Unread::NotAForm)?;
        let content_type = String::from_utf8_lossy(content_type.as_bytes());
        let (essence, _) = content_type.split_once(';').unwrap_or((&content_type, ""));
        let boundary = parameter(&content_type, "boundary").unwrap_or_default();
        let fits = essence.trim().eq_ignore_ascii_case("multipart/form-data")
            && (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len());
        if !fits {
            return Err(Unread::NotAForm);
        }
        let delimiter = Finder::new(&format!("\r\n--{boundary}")).into_owned();
        // As if a line had ended before the first boundary.
        let buffer = BytesMut::from(&b"\r\n"[..]);
        Ok(Form { body: request.into_body(), delimiter, buffer, at: At::Preamble, seen: 0, bytes_max })
    }

    /// The next part; what is left of the one before is passed over.
    pub(crate) async fn next(&mut self) -> Result<Option<Part>, Unread> {
        match self.at {
            At::Preamble => {
                let mut passed = 0;
                while let Some(piece) = self.up_to_delimiter().await? {
                    passed += piece.len();
                    if passed > PREAMBLE_BYTES_MAX {
                        return Err(Unread::Broken);
                    }
                }
            }
            At::Content => while self.chunk().await?.is_some() {},
            At::Head => {}
            At::End => return Ok(None),
        }
        self.at = At::Head;
        self.head().await
    }

    /// The next piece of the part's content.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Unread> {
        if self.at != At::Content {
            return Ok(None);
        }
        let piece = self.up_to_delimiter().await?;
        if piece.is_none() {
            self.at = At::Head;
        }
        Ok(piece)
    }

    /// The whole content of a part that is a field; `None`, and passed over, when it is longer than `bytes_max`.
    pub(crate) async fn content(&mut self, bytes_max: usize) -> Result<Option<Vec<u8>>, Unread> {
        let mut content = Vec::new();
        let mut fits = true;
        while let Some(piece) = self.chunk().await? {
            fits &= content.len() + piece.len() <= bytes_max;
            if fits {
                content.extend_from_slice(&piece);
            }
        }
        Ok(fits.then_some(content))
    }

    /// What certainly stands before the next delimiter; nothing once that is passed.
    async fn up_to_delimiter(&mut self) -> Result<Option<Bytes>, Unread> {
        let length = self.delimiter.needle().len();
        loop {
            match self.delimiter.find(&self.buffer) {
                Some(0) => {
                    self.buffer.advance(length);
                    return Ok(None);
                }
                Some(at) => return Ok(Some(self.buffer.split_to(at).freeze())),
                None => {}
            }
            // The last bytes may be the beginning of one.
            let certain = self.buffer.len().saturating_sub(length - 1);
            if certain > 0 {
                return Ok(Some(self.buffer.split_to(certain).freeze()));
            }
            self.fill().await?;
        }
    }

    async fn head(&mut self) -> Result<Option<Part>, Unread> {
        loop {
            if self.buffer.starts_with(b"--") {
                self.at = At::End;
                self.epilogue().await;
                return Ok(None);
            }
            if let Some(end) = memmem::find(&self.buffer, b"\r\n\r\n") {
                if end > HEAD_BYTES_MAX {
                    return Err(Unread::Broken);
                }
                let head = self.buffer.split_to(end);
                self.buffer.advance(4);
                self.at = At::Content;
                return Part::parse(&head).map(Some).ok_or(Unread::Broken);
            }
            if self.buffer.len() > HEAD_BYTES_MAX {
                return Err(Unread::Broken);
            }
            self.fill().await?;
        }
    }

    /// Reads the little that may follow. A connection whose body was not read to its end is closed behind the answer, and
    /// a client that has sent its next request by then sees a reset.
    async fn epilogue(&mut self) {
        let mut passed = 0;
        while passed <= EPILOGUE_BYTES_MAX {
            self.buffer.clear();
            match self.fill().await {
                Ok(()) => passed += self.buffer.len(),
                // The form is whole, whatever became of what stands behind it.
                Err(_) => return,
            }
        }
    }

    async fn fill(&mut self) -> Result<(), Unread> {
        let frame = tokio::time::timeout(IDLE_MAX, self.body.frame()).await.map_err(|_| Unread::TooSlow)?;
        let Some(Ok(frame)) = frame else { return Err(Unread::Broken) };
        if let Ok(data) = frame.into_data() {
            self.seen += data.len() as u64;
            if self.seen > self.bytes_max {
                return Err(Unread::TooLarge);
            }
            self.buffer.extend_from_slice(&data);
        }
        Ok(())
    }
}

impl Part {
    /// From what stands between a boundary and the empty line. `None` when the boundary's line goes on.
    fn parse(head: &[u8]) -> Option<Part> {
        let mut part = Part::default();
        let head = String::from_utf8_lossy(head);
        let mut lines = head.split("\r\n");
        if !lines.next()?.chars().all(|character| matches!(character, ' ' | '\t')) {
            return None;
        }
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.trim().eq_ignore_ascii_case("content-disposition") {
                part.name = parameter(value, "name").unwrap_or_default();
                part.file_name = parameter(value, "filename").or_else(|| extended(value));
            } else if name.trim().eq_ignore_ascii_case("content-type") {
                part.content_type = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            }
        }
        Some(part)
    }
}

/// A name given as `filename*=UTF-8''r%C3%A4port.txt` (RFC 8187).
fn extended(value: &str) -> Option<String> {
    let text = parameter(value, "filename*")?;
    let mut parts = text.splitn(3, '\'');
    let (charset, _, name) = (parts.next()?, parts.next()?, parts.next()?);
    charset.eq_ignore_ascii_case("utf-8").then(|| percent_decode_str(name).decode_utf8_lossy().into_owned())
}

/// A parameter of a header such as `form-data; name="file"; filename="a;b.txt"`.
fn parameter(value: &str, wanted: &str) -> Option<String> {
    let (_, mut rest) = value.split_once(';')?;
    loop {
        let end = rest.find(['=', ';'])?;
        let key = rest[..end].trim();
        if rest[end..].starts_with(';') {
            rest = &rest[end + 1..];
            continue;
        }
        let value = rest[end + 1..].trim_start();
        let (value, behind) = match value.strip_prefix('"') {
            Some(quoted) => unquote(quoted),
            None => {
                let end = value.find(';').unwrap_or(value.len());
                (value[..end].trim_end().to_owned(), &value[end..])
            }
        };
        if key.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = behind.split_once(';')?.1;
    }
}

/// What a quoted value says, and what stands behind it. Clients differ in how they write a quote in a name: as `\"`, as
/// `%22` or as it is. So a quote ends the value only where one can, and a backslash escapes nothing but a quote.
fn unquote(quoted: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = quoted;
    while let Some(at) = rest.find('"') {
        let (before, behind) = (&rest[..at], &rest[at + 1..]);
        let can_end = matches!(behind.trim_start().chars().next(), None | Some(';'));
        let is_escaped = before.ends_with('\\') && behind.contains('"');
        match (is_escaped, can_end) {
            (true, _) => {
                value.push_str(&before[..before.len() - 1]);
                value.push('"');
            }
            (false, true) => {
                value.push_str(before);
                return (value, behind);
            }
            (false, false) => {
                value.push_str(before);
                value.push('"');
            }
        }
        rest = behind;
    }
    value.push_str(rest);
    (value, "")
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use proptest::prelude::*;

    use super::*;

    fn form(pieces: Vec<Vec<u8>>, content_type: &str) -> Result<Form, Unread> {
        let body = Body::from_stream(stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>)));
        let request = Request::builder().header("content-type", content_type).body(body).unwrap();
        Form::of(request, 1 << 20)
    }

    /// Every part with its content.
    async fn read(pieces: Vec<Vec<u8>>, boundary: &str) -> Result<Vec<(Part, Vec<u8>)>, Unread> {
        let mut form = form(pieces, &format!("multipart/form-data; boundary={boundary}"))?;
        let mut parts = Vec::new();
        while let Some(part) = form.next().await? {
            let mut content = Vec::new();
            while let Some(piece) = form.chunk().await? {
                content.extend_from_slice(&piece);
            }
            parts.push((part, content));
        }
        Ok(parts)
    }

    fn head(value: &str) -> Part {
        Part::parse(format!("\r\nContent-Disposition: {value}").as_bytes()).unwrap()
    }

    fn file(name: &str) -> Part {
        Part { name: "file".to_owned(), file_name: Some(name.to_owned()), content_type: None }
    }

    #[test]
    fn names_are_kept_as_they_were_sent() {
        for name in [
            "a.txt",
            "ünï 漢字 🎉.txt",
            "semi;colon,comma.txt",
            "it's.txt",
            "a\\b.txt",
            "per%20cent.txt",
            "a=b",
            "",
            "; name=x",
        ] {
            assert_eq!(head(&format!("form-data; name=\"file\"; filename=\"{name}\"")), file(name), "{name}");
            assert_eq!(head(&format!("form-data; filename=\"{name}\"; name=\"file\"")), file(name), "{name}");
        }
        for (written, name) in [
            ("filename=\"say \\\"hi\\\".txt\"", "say \"hi\".txt"),
            ("filename=\"say \"hi\".txt\"", "say \"hi\".txt"),
            ("filename=\"C:\\dir\\\"", "C:\\dir\\"),
            ("filename=plain.txt", "plain.txt"),
            ("FileName=\"a\"", "a"),
            ("filename*=UTF-8''r%C3%A4port%20%22x%22.txt", "räport \"x\".txt"),
            ("filename=\"first\"; filename*=UTF-8''second", "first"),
            ("filename=\"open", "open"),
            ("filename=\"a\tb\u{1}c\nd\"", "a\tb\u{1}c\nd"),
        ] {
            assert_eq!(head(&format!("form-data; name=\"file\"; {written}")), file(name), "{written}");
        }
        let field = head("form-data; name=\"kind\"");
        assert_eq!(field, Part { name: "kind".to_owned(), ..Part::default() });
        // No UTF-8, and still a file.
        let bytes = [
            b"\r\nContent-Disposition: form-data; name=\"file\"; filename=\"\xe4.txt\"\r\ncontent-TYPE: a/b",
        ];
        let wanted = Part { content_type: Some("a/b".to_owned()), ..file("\u{fffd}.txt") };
        assert_eq!(Part::parse(bytes[0]), Some(wanted));
    }

    #[tokio::test]
    async fn only_forms_are_read() {
        for content_type in [
            "application/json",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/mixed; boundary=x",
            "multipart/form-data; boundary=\"\"",
            &format!("multipart/form-data; boundary={}", "x".repeat(71)),
        ] {
            assert_eq!(form(Vec::new(), content_type).err(), Some(Unread::NotAForm), "{content_type}");
        }
        for content_type in
            ["Multipart/Form-Data; charset=utf-8; BOUNDARY=\"a b\"", "multipart/form-data;boundary=----x"]
        {
            assert!(form(Vec::new(), content_type).is_ok(), "{content_type}");
        }
    }

    #[tokio::test]
    async fn a_form_that_breaks_off_or_never_begins_is_broken() {
        let part = "--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nbody";
        for text in [
            String::new(),
            "no form".to_owned(),
            "--x".to_owned(),
            "--x\r\nContent-Disp".to_owned(),
            part.to_owned(),
            format!("{part}\r\n--"),
            format!("{part}\r\n--x"),
            format!("{part}\r\n--xy\r\n\r\n"),
            format!("{}{part}\r\n--x--", " ".repeat(PREAMBLE_BYTES_MAX + 10)),
            format!("--x\r\nA: {}\r\n\r\n", "a".repeat(HEAD_BYTES_MAX)),
            format!("--x\r\nA: {}", "a".repeat(100 * HEAD_BYTES_MAX)),
        ] {
            let pieces = text.as_bytes().chunks(1000).map(<[u8]>::to_vec).collect();
            assert_eq!(read(pieces, "x").await, Err(Unread::Broken), "{}", &text[..text.len().min(80)]);
        }
        let large = format!("{part}{}", "a".repeat(2 << 20));
        assert_eq!(read(vec![large.into_bytes()], "x").await, Err(Unread::TooLarge));
        assert_eq!(read(vec![b"--x--".to_vec()], "x").await, Ok(Vec::new()));
        let whole = format!("preamble\r\n{part}\r\n--x-- \r\nepilogue");
        assert_eq!(read(vec![whole.into_bytes()], "x").await.map(|parts| parts.len()), Ok(1));
    }

    #[tokio::test]
    async fn a_body_is_read_to_its_end_so_that_its_connection_serves_on() {
        for behind in ["", "\r\n", "\r\nan epilogue\r\n"] {
            let (sender, receiver) = tokio::sync::mpsc::channel(1);
            let text = format!("--x\r\n\r\na\r\n--x--{behind}");
            let pieces: Vec<_> = text.bytes().map(|byte| Ok::<_, std::io::Error>(vec![byte])).collect();
            // Polled once more when all was taken: that is where a connection learns that the body has ended.
            let body = stream::StreamExt::chain(
                stream::iter(pieces),
                stream::once(async move {
                    sender.send(()).await.expect("the test waits");
                    Ok(Vec::new())
                }),
            );
            let request = Request::builder().header("content-type", "multipart/form-data; boundary=x");
            let mut form = Form::of(request.body(Body::from_stream(body)).unwrap(), 1 << 20).unwrap();
            while form.next().await.unwrap().is_some() {}
            assert_eq!(receiver.len(), 1, "{behind:?}");
        }
    }

    #[tokio::test]
    async fn a_field_that_is_too_long_is_passed_over() {
        let text = "--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n0123456789\r\n--x\r\n\r\nshort\r\n--x--";
        let mut form = form(vec![text.into()], "multipart/form-data; boundary=x").unwrap();
        form.next().await.unwrap().unwrap();
        assert_eq!(form.content(9).await, Ok(None));
        assert_eq!(form.next().await, Ok(Some(Part::default())));
        assert_eq!(form.content(9).await, Ok(Some(b"short".to_vec())));
        assert_eq!(form.next().await, Ok(None));
        assert_eq!(form.next().await, Ok(None));
    }

    proptest! {
        /// Whatever the content and wherever the network cuts it, it comes out as it went in.
        #[test]
        fn parts_come_out_as_they_went_in(
            contents in proptest::collection::vec(
                proptest::collection::vec(prop_oneof![any::<u8>(), proptest::sample::select(&b"\r\n-x"[..])], 0..80), 0..4),
            cut in 1_usize..40,
        ) {
            let clean = |content: &Vec<u8>| memmem::find(&[b"\r\n", &content[..]].concat(), b"\r\n--xx").is_none();
            prop_assume!(contents.iter().all(clean));
            let mut whole = Vec::new();
            for (at, content) in contents.iter().enumerate() {
                whole.extend_from_slice(format!("--xx\r\nContent-Disposition: form-data; name=\"{at}\"\r\n\r\n").as_bytes());
                whole.extend_from_slice(content);
                whole.extend_from_slice(b"\r\n");
            }
            whole.extend_from_slice(b"--xx--\r\n");
            let pieces = whole.chunks(cut).map(<[u8]>::to_vec).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let parts = runtime.block_on(read(pieces, "xx")).unwrap();
            let read: Vec<_> = parts.into_iter().map(|(_, content)| content).collect();
            prop_assert_eq!(read, contents);
        }

        /// No head makes it panic, and what a name says between plain quotes is what comes out.
        #[test]
        fn any_head_is_read(head in any::<Vec<u8>>(), value in any::<String>()) {
            Part::parse(&head);
            Part::parse(format!("\r\nContent-Disposition: {value}").as_bytes());
            parameter(&value, "filename");
            let name = value.replace(['"', '\\', '\r', '\n'], "");
            let part = Part::parse(format!("\r\nContent-Disposition: form-data; filename=\"{name}\"").as_bytes());
            prop_assert_eq!(part.and_then(|part| part.file_name), Some(name));
        }
    }
}
