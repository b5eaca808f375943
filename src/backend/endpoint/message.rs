//! Jupyter messages on a WebSocket, in the two forms that servers speak: the subprotocol
//! `v1.kernel.websocket.jupyter.org` (a table of offsets, then the parts as they are) and plain JSON.
//!
//! What comes in is only taken apart as far as it must be to know whose it is; its content is read by
//! whoever wants it. Anything that is no message is none.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio_tungstenite::tungstenite::Message as Frame;

use crate::harness::frame::repair_surrogates;

/// The subprotocol's name in the handshake.
pub(super) const SUBPROTOCOL: &str = "v1.kernel.websocket.jupyter.org";
/// Most parts a message may have; those beyond the fifth are buffers of widgets, which are not read.
const OFFSETS_MAX: usize = 1024;
/// Longest kind and ids of a message, in bytes. One with longer ones is none of ours.
const ID_BYTES_MAX: usize = 1024;
/// Version of the messaging protocol that is spoken.
const VERSION: &str = "5.3";

/// How messages lie in frames.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Offsets,
    Json,
}

/// A message from the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) channel: Channel,
    pub(super) kind: String,
    /// Identity of the kernel's process: another one has other names.
    pub(super) session: String,
    /// The request it belongs to; empty when it belongs to none.
    pub(super) parent: String,
    /// JSON, not yet looked at.
    pub(super) content: Bytes,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    Shell,
    IoPub,
    Stdin,
    Other,
}

impl Channel {
    fn parse(name: &str) -> Channel {
        match name {
            "shell" => Channel::Shell,
            "iopub" => Channel::IoPub,
            "stdin" => Channel::Stdin,
            _ => Channel::Other,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Channel::Shell => "shell",
            Channel::IoPub => "iopub",
            Channel::Stdin => "stdin",
            Channel::Other => "control",
        }
    }
}

/// A request of ours.
#[derive(Copy, Clone, Debug)]
pub(super) struct Request<'a, C> {
    pub(super) channel: Channel,
    pub(super) kind: &'a str,
    pub(super) id: &'a str,
    pub(super) session: &'a str,
    pub(super) content: &'a C,
}

#[derive(Serialize)]
struct HeaderOut<'a> {
    msg_id: &'a str,
    msg_type: &'a str,
    session: &'a str,
    username: &'a str,
    date: String,
    version: &'a str,
}

#[derive(Serialize)]
struct JsonOut<'a, C> {
    channel: &'a str,
    header: HeaderOut<'a>,
    parent_header: Empty,
    metadata: Empty,
    content: &'a C,
    buffers: [(); 0],
}

#[derive(Serialize)]
struct Empty {}

/// A request as a frame.
pub(super) fn encode<C: Serialize>(form: Form, request: Request<'_, C>) -> Frame {
    let header = HeaderOut {
        msg_id: request.id,
        msg_type: request.kind,
        session: request.session,
        username: "caisson",
        date: jiff::Timestamp::now().to_string(),
        version: VERSION,
    };
    let (channel, content) = (request.channel.name(), request.content);
    match form {
        Form::Json => {
            let (parent_header, metadata, buffers) = (Empty {}, Empty {}, []);
            let whole = JsonOut { channel, header, parent_header, metadata, content, buffers };
            Frame::text(serde_json::to_string(&whole).expect("our own types have a JSON form"))
        }
        Form::Offsets => {
            let json = |value| serde_json::to_vec(value).expect("our own types have a JSON form");
            let content = serde_json::to_vec(content).expect("our own types have a JSON form");
            let parts = [channel.as_bytes().to_vec(), json(&header), b"{}".to_vec(), b"{}".to_vec(), content];
            Frame::binary(join(&parts))
        }
    }
}

/// The table of offsets and the parts behind it.
pub(super) fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let count = parts.len() + 1;
    let mut out = (count as u64).to_le_bytes().to_vec();
    let mut at = 8 * (count + 1);
    out.extend((at as u64).to_le_bytes());
    for part in parts {
        at += part.len();
        out.extend((at as u64).to_le_bytes());
    }
    out.extend(parts.concat());
    out
}

/// The message in a frame, or nothing when there is none: a ping, a close, garbage.
pub(super) fn decode(form: Form, frame: Frame) -> Option<Message> {
    let message = match (form, frame) {
        (Form::Offsets, Frame::Binary(bytes)) => decode_offsets(&bytes),
        (Form::Json, Frame::Text(text)) => decode_json(&text.into()),
        (Form::Json, Frame::Binary(bytes)) => decode_json(&json_before_buffers(&bytes)?),
        _ => None,
    };
    let fits = |message: &Message| {
        let kept = [&message.kind, &message.session, &message.parent];
        kept.into_iter().all(|text| text.len() <= ID_BYTES_MAX)
    };
    message.filter(fits)
}

#[derive(Deserialize)]
struct HeaderIn {
    msg_type: String,
    #[serde(default)]
    session: String,
}

#[derive(Deserialize, Default)]
struct ParentIn {
    #[serde(default)]
    msg_id: String,
}

#[derive(Deserialize)]
struct JsonIn<'a> {
    #[serde(default)]
    channel: String,
    header: HeaderIn,
    #[serde(default)]
    parent_header: Option<ParentIn>,
    #[serde(borrow)]
    content: &'a RawValue,
}

fn decode_offsets(bytes: &Bytes) -> Option<Message> {
    let number = |index: usize| {
        let raw = bytes.get(8 * index..8 * index + 8)?;
        usize::try_from(u64::from_le_bytes(raw.try_into().ok()?)).ok()
    };
    // The channel and four parts have six ends between them.
    let count = number(0).filter(|count| (6..=OFFSETS_MAX).contains(count))?;
    let part = |index: usize| {
        let (from, to) = (number(index + 1)?, number(index + 2)?);
        (8 * (count + 1) <= from && from <= to && to <= bytes.len()).then(|| bytes.slice(from..to))
    };
    let header: HeaderIn = read(&part(1)?)?;
    let parent: ParentIn = read(&part(2)?).unwrap_or_default();
    Some(Message {
        channel: Channel::parse(std::str::from_utf8(&part(0)?).ok()?),
        kind: header.msg_type,
        session: header.session,
        parent: parent.msg_id,
        content: part(4)?,
    })
}

fn decode_json(bytes: &Bytes) -> Option<Message> {
    let repaired = text_of(bytes);
    let wire: JsonIn<'_> = serde_json::from_str(&repaired).ok()?;
    Some(Message {
        channel: Channel::parse(&wire.channel),
        kind: wire.header.msg_type,
        session: wire.header.session,
        parent: wire.parent_header.unwrap_or_default().msg_id,
        content: Bytes::copy_from_slice(wire.content.get().as_bytes()),
    })
}

/// In plain JSON a message with buffers is binary: their number and offsets in four bytes each, big-endian, the
/// first of them the JSON.
fn json_before_buffers(bytes: &Bytes) -> Option<Bytes> {
    let number = |index: usize| {
        let raw = bytes.get(4 * index..4 * index + 4)?;
        usize::try_from(u32::from_be_bytes(raw.try_into().ok()?)).ok()
    };
    let count = number(0)?;
    let end = if count > 1 { number(2)? } else { bytes.len() };
    let from = number(1)?;
    (count >= 1 && from <= end && end <= bytes.len()).then(|| bytes.slice(from..end))
}

/// Reads JSON of the other side's, strict first, then with its text repaired.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    // serde would also take a list for a struct.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    serde_json::from_slice(bytes).ok().or_else(|| serde_json::from_str(&text_of(bytes)).ok())
}

/// The text of JSON, with what is no text replaced.
fn text_of(bytes: &[u8]) -> Cow<'_, str> {
    match String::from_utf8_lossy(bytes) {
        Cow::Borrowed(text) => repair_surrogates(text),
        Cow::Owned(text) => Cow::Owned(repair_surrogates(&text).into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const REQUEST: Request<'_, Value> = Request {
        channel: Channel::Shell,
        kind: "execute_request",
        id: "m1",
        session: "s1",
        content: &Value::Null,
    };

    fn parts(parts: &[&str]) -> Frame {
        let parts: Vec<Vec<u8>> = parts.iter().map(|part| part.as_bytes().to_vec()).collect();
        Frame::binary(join(&parts))
    }

    #[test]
    fn a_request_comes_back_in_either_form() {
        for form in [Form::Offsets, Form::Json] {
            let content = json!({"code": "print('ä')"});
            let frame = encode(form, Request { content: &content, ..REQUEST });
            let message = decode(form, frame).expect("our own message");
            assert_eq!((message.channel, message.kind.as_str()), (Channel::Shell, "execute_request"));
            assert_eq!((message.session.as_str(), message.parent.as_str()), ("s1", ""));
            assert_eq!(read::<Value>(&message.content), Some(content));
        }
    }

    /// Byte for byte what `jupyter_server.services.kernels.connection.base.serialize_msg_to_ws_v1` gives.
    #[test]
    fn the_table_of_offsets_is_the_servers() {
        let joined =
            join(&[b"shell".to_vec(), b"{}".to_vec(), b"{}".to_vec(), b"{}".to_vec(), b"{}".to_vec()]);
        let offsets = [6, 56, 61, 63, 65, 67, 69_u64].map(u64::to_le_bytes).concat();
        assert_eq!(joined, [offsets, b"shell{}{}{}{}".to_vec()].concat());
    }

    #[test]
    fn a_message_with_buffers_is_read_up_to_them() {
        let header = r#"{"msg_type":"display_data"}"#;
        let frame = parts(&["iopub", header, r#"{"msg_id":"m1"}"#, "{}", r#"{"data":{}}"#, "buffer"]);
        let message = decode(Form::Offsets, frame).expect("a message");
        assert_eq!((message.parent.as_str(), &message.content[..]), ("m1", &br#"{"data":{}}"#[..]));

        let json = r#"{"channel":"iopub","header":{"msg_type":"x"},"parent_header":null,"content":{}}"#;
        let mut bytes = [2_u32, 12, 12 + json.len() as u32].map(u32::to_be_bytes).concat();
        bytes.extend(json.as_bytes());
        bytes.extend(b"buffer");
        let message = decode(Form::Json, Frame::binary(bytes)).expect("a message");
        assert_eq!((message.channel, message.kind.as_str()), (Channel::IoPub, "x"));
    }

    #[test]
    fn text_that_is_none_is_repaired() {
        #[derive(Deserialize)]
        struct Text {
            text: String,
        }
        let read = |bytes: &[u8]| read::<Text>(bytes).map(|it| it.text);
        assert_eq!(read(br#"{"text":"a\ud800b"}"#).as_deref(), Some("a\u{fffd}b"));
        assert_eq!(read(b"{\"text\":\"a\xff\"}").as_deref(), Some("a\u{fffd}"));
        assert_eq!(read(br#"["a"]"#), None);
    }

    #[test]
    fn a_message_with_endless_ids_is_none() {
        for (bytes, is_one) in [(ID_BYTES_MAX, true), (ID_BYTES_MAX + 1, false)] {
            let parent = json!({"msg_id": "x".repeat(bytes)}).to_string();
            let frame = parts(&["iopub", r#"{"msg_type":"status"}"#, &parent, "{}", "{}"]);
            assert_eq!(decode(Form::Offsets, frame).is_some(), is_one);
        }
    }

    #[test]
    fn a_forged_table_of_offsets_is_no_message() {
        let table = |numbers: &[u64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            decode(Form::Offsets, Frame::binary(bytes))
        };
        assert_eq!(table(&[6, 56, u64::MAX, 63, 65, 67, 69]), None);
        assert_eq!(table(&[6, 0, 8, 16, 24, 32, 40]), None, "parts inside the table");
        assert_eq!(table(&[u64::MAX]), None);
        assert_eq!(table(&[]), None);
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_server_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            decode(Form::Offsets, Frame::binary(bytes.clone()));
            decode(Form::Json, Frame::binary(bytes));
        }

        #[test]
        fn no_table_of_a_server_breaks_the_reader(
            numbers in proptest::collection::vec(prop_oneof![0_u64..120, any::<u64>()], 0..12),
        ) {
            let mut bytes = 6_u64.to_le_bytes().to_vec();
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            decode(Form::Offsets, Frame::binary(bytes));
        }

        #[test]
        fn every_code_survives_either_form(code in any::<String>()) {
            for form in [Form::Offsets, Form::Json] {
                let content = json!({"code": code.clone()});
                let message = decode(form, encode(form, Request { content: &content, ..REQUEST }));
                prop_assert_eq!(read::<Value>(&message.expect("our own").content), Some(content));
            }
        }
    }
}
