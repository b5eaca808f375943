//! What the daemon and a space's helper say to each other, as plain data.
//!
//! A message is JSON and bytes, cut into frames of one packet each: frames of different calls may mix, those of
//! one call keep their order. Guests cannot reach the socket; the daemon takes nothing on trust anyway, so lengths
//! are capped and every type is checked on both ends.
//!
//! Paths and names in messages are text in the form of [`super::names`]; lines count from 0 unless a field says so.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Payload of one frame. A packet of this size fits into a socket's default buffer several times.
pub const FRAME_BYTES_MAX: usize = 48 * 1024;
/// Header of a frame: id, kind, and three bytes that are zero.
pub const HEADER_BYTES: usize = 12;
/// Longest message to a helper: a write of what fits into a JSON body.
pub const CALL_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Longest answer of a helper: a text before and after an edit, with room for what JSON adds.
pub const ANSWER_BYTES_MAX: usize = 48 * 1024 * 1024;
/// Longest text that is read into an answer.
pub const TEXT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// All names and lines of one listing or search together.
pub const RESULT_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Entries of one listing.
pub const LIST_ENTRIES_MAX: usize = 10_000;
/// Names of one search by name.
pub const FIND_ENTRIES_MAX: usize = 10_000;
/// Entries of one glob.
pub const GLOB_ENTRIES_MAX: usize = 5_000;
/// Matches of one grep unless the caller says otherwise, and at most.
pub const GREP_MATCHES_USUAL: usize = 500;
pub const GREP_MATCHES_MAX: usize = 10_000;
/// Files that a grep looks into unless they are larger, and at most.
pub const GREP_FILE_BYTES_USUAL: u64 = 1024 * 1024;
pub const GREP_FILE_BYTES_MAX: u64 = TEXT_BYTES_MAX as u64;
/// Lines shown before and after a match.
pub const CONTEXT_LINES_MAX: usize = 100;
/// Longest path of a request.
pub const PATH_BYTES_MAX: usize = 64 * 1024;
/// Contents of a tree that goes in or out as tar.
pub const TREE_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;
pub const TREE_ENTRIES_MAX: u64 = 100_000;

/// What one frame is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A piece of a message; more follow.
    Part = 0,
    /// The last piece of a message.
    End = 1,
    /// To the helper: the stream of this call was sent whole. Its message says under which path to keep it.
    Finish = 2,
    /// To the helper: nobody waits for this call any more.
    Cancel = 3,
}

/// A packet that is no frame, or a message that is none.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a message of the file helper's protocol")]
pub struct Malformed;

/// One packet, without its payload.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub id: u64,
    pub kind: Kind,
}

impl Header {
    fn bytes(self) -> [u8; HEADER_BYTES] {
        let mut out = [0_u8; HEADER_BYTES];
        out[..8].copy_from_slice(&self.id.to_le_bytes());
        out[8] = self.kind as u8;
        out
    }

    /// The header and payload of a packet.
    pub fn split(packet: &[u8]) -> Result<(Header, &[u8]), Malformed> {
        let (header, payload) = packet.split_at_checked(HEADER_BYTES).ok_or(Malformed)?;
        let (id, rest) = header.split_first_chunk::<8>().ok_or(Malformed)?;
        let kind = match *rest {
            [0, 0, 0, 0] => Kind::Part,
            [1, 0, 0, 0] => Kind::End,
            [2, 0, 0, 0] => Kind::Finish,
            [3, 0, 0, 0] => Kind::Cancel,
            _ => return Err(Malformed),
        };
        Ok((Header { id: u64::from_le_bytes(*id), kind }, payload))
    }
}

/// The packets of a message; a short one is a single packet.
pub fn packets(id: u64, last: Kind, message: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let pieces = message.len().div_ceil(FRAME_BYTES_MAX).max(1);
    (0..pieces).map(move |piece| {
        let kind = if piece + 1 == pieces { last } else { Kind::Part };
        let from = piece * FRAME_BYTES_MAX;
        let payload = &message[from..message.len().min(from + FRAME_BYTES_MAX)];
        [&Header { id, kind }.bytes()[..], payload].concat()
    })
}

/// A message of JSON and bytes beside it.
pub fn join(json: &impl Serialize, bytes: &[u8]) -> Vec<u8> {
    let json = serde_json::to_vec(json).expect("our messages have string keys and no failing parts");
    let length = u32::try_from(json.len()).expect("messages are far below 4 GiB");
    [&length.to_le_bytes()[..], &json, bytes].concat()
}

/// Takes a message apart.
pub fn split<'a, T: Deserialize<'a>>(message: &'a [u8]) -> Result<(T, &'a [u8]), Malformed> {
    let (length, rest) = message.split_first_chunk::<4>().ok_or(Malformed)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| Malformed)?;
    let (json, bytes) = rest.split_at_checked(length).ok_or(Malformed)?;
    Ok((serde_json::from_slice(json).map_err(|_| Malformed)?, bytes))
}

/// A call: what to do, and for how long to try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub op: Op,
    /// Milliseconds from the call's arrival. A stream has them anew after each piece.
    pub time_ms_max: u64,
}

/// What a helper can be asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Answers the text beside the JSON.
    Read {
        path: String,
        start_line: Option<u64>,
        end_line: Option<u64>,
    },
    /// The content is beside the JSON.
    Write {
        path: String,
        append: bool,
    },
    List(List),
    /// Names of files that fit a glob.
    Find {
        path: String,
        pattern: String,
    },
    Glob(Glob),
    Grep(Grep),
    /// Lines of one file.
    Search {
        path: String,
        regex: String,
    },
    Replace {
        path: String,
        old: String,
        new: String,
    },
    Edit {
        path: String,
        edit: Edit,
    },
    Stat {
        path: String,
        follow: bool,
    },
    Mkdir {
        path: String,
        parents: bool,
    },
    Copy {
        source: String,
        destination: String,
        overwrite: bool,
    },
    Move {
        source: String,
        destination: String,
        overwrite: bool,
    },
    Delete {
        path: String,
        recursive: bool,
    },
    /// Answers with a handle on the home folder, good for nothing but to see on which device it lies.
    Space,
    /// Answers with a descriptor to read a file by.
    Open {
        path: String,
    },
    /// Comes with the reading end of a pipe. The path may also come with [`Kind::Finish`].
    Upload {
        path: Option<String>,
        bytes_max: u64,
        /// Part of the temporary name, so that the daemon can have it cleared when this helper dies.
        token: String,
    },
    /// Comes with the writing end of a pipe.
    TreeOut {
        path: String,
        bytes_max: u64,
    },
    /// Comes with the reading end of a pipe.
    TreeIn {
        path: String,
        bytes_max: u64,
        /// As for an upload.
        token: String,
    },
    /// Removes what another helper left of a stream to `path` when it died.
    Clear {
        path: Option<String>,
        token: String,
    },
}

impl Op {
    /// How much of an answer there may be.
    pub fn bulk(&self) -> Bulk {
        match self {
            Op::Read { .. } | Op::Edit { .. } | Op::Replace { .. } => Bulk::Text,
            Op::List(_) | Op::Find { .. } | Op::Glob(_) | Op::Grep(_) | Op::Search { .. } => Bulk::Names,
            _ => Bulk::Little,
        }
    }

    /// Whether doing it again changes nothing.
    pub fn only_reads(&self) -> bool {
        matches!(
            self,
            Op::Read { .. }
                | Op::List(_)
                | Op::Find { .. }
                | Op::Glob(_)
                | Op::Grep(_)
                | Op::Search { .. }
                | Op::Stat { .. }
                | Op::Open { .. }
        )
    }
}

/// What an operation may take of memory, here and inside.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Bulk {
    /// Whole texts, up to [`TEXT_BYTES_MAX`] each.
    Text,
    /// Names and lines, up to [`RESULT_BYTES_MAX`] together.
    Names,
    Little,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct List {
    pub path: String,
    pub recursive: bool,
    pub hidden: bool,
    /// Levels below the folder; 1 is what lies in it.
    pub depth_max: Option<u64>,
    /// Extensions to keep, such as `.py`; empty keeps everything.
    pub extensions: Vec<String>,
    pub with_size: bool,
    pub with_permissions: bool,
    pub sort: Sort,
    pub descending: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Glob {
    pub path: String,
    pub pattern: String,
    pub exclude: Vec<String>,
    pub hidden: bool,
    pub files_only: bool,
    pub with_metadata: bool,
    pub results_max: usize,
    pub sort: Sort,
    pub descending: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Grep {
    pub path: String,
    pub pattern: String,
    pub include: Vec<String>,
    pub exclude: Vec<String>,
    /// A name of ripgrep's file types, such as `py`.
    pub file_type: Option<String>,
    pub case_insensitive: bool,
    pub fixed_strings: bool,
    pub multiline: bool,
    pub recursive: bool,
    pub context_before: usize,
    pub context_after: usize,
    /// Matches that are found and not shown before the first that is.
    pub offset: usize,
    pub results_max: usize,
    pub file_bytes_max: u64,
}

/// By what a listing is sorted. Names and paths break ties.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sort {
    #[default]
    Path,
    Name,
    Size,
    Modified,
    /// Folders first, then by extension.
    Type,
}

/// What the editor does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Edit {
    /// First and last line from 1; a last line of -1 is the end.
    View {
        range: Option<(u64, i64)>,
    },
    Create {
        text: String,
    },
    Replace {
        old: String,
        new: String,
        mode: Option<Occurrence>,
    },
    /// After that many lines.
    Insert {
        line: u64,
        text: String,
    },
    Undo,
}

/// Which of several occurrences is replaced.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Occurrence {
    All,
    First,
    Last,
}

/// What comes with [`Kind::Finish`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Finish {
    pub path: Option<String>,
    /// A name in the folder for temporary files, where there is no path.
    pub name: Option<String>,
}

/// What a helper answers.
pub type Answered = Result<Answer, Fault>;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// The text is beside the JSON.
    Text,
    Written {
        bytes: u64,
    },
    Listed(Listed),
    Found {
        files: Vec<String>,
        truncated: bool,
    },
    Globbed(Globbed),
    Grepped(Grepped),
    Searched {
        matches: Vec<String>,
        line_numbers: Vec<u64>,
    },
    Replaced {
        count: u64,
    },
    Edited(Edited),
    Stat(FileStat),
    Made {
        created: bool,
    },
    Copied {
        files: u64,
        bytes: u64,
    },
    Moved,
    Deleted {
        is_directory: bool,
    },
    /// A descriptor comes with it.
    Opened,
    Uploaded {
        path: String,
        bytes: u64,
    },
    TreeSent,
    Cleared,
    TreeReceived {
        entries: u64,
        mode: TreeMode,
    },
}

/// How a tree came to its place.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TreeMode {
    /// As a whole: nothing was there.
    Rename,
    /// File by file into a folder that was there.
    Merge,
}

/// What a folder holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Listed {
    pub files: Vec<Entry>,
    pub total_count: u64,
    pub file_count: u64,
    pub directory_count: u64,
    /// Whether there was more than one answer holds.
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    pub name: String,
    pub path: String,
    /// A link to a folder is no folder.
    pub is_directory: bool,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub size: Option<u64>,
    /// Such as `.csv`, null without one.
    pub extension: Option<String>,
    /// Seconds since the epoch.
    pub modified_time: String,
    /// Octal, such as `644`; only when asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub permissions: Option<String>,
    /// There only when true.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_hidden: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Globbed {
    pub files: Vec<GlobEntry>,
    pub total_count: u64,
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GlobEntry {
    pub path: String,
    pub name: String,
    pub is_directory: bool,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub size: Option<u64>,
    /// Seconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub modified_time: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Grepped {
    pub matches: Vec<GrepMatch>,
    pub match_count: u64,
    pub files_searched: u64,
    pub files_matched: u64,
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GrepMatch {
    pub file: String,
    /// From 1.
    pub line_number: u64,
    pub line_content: String,
    pub context_before: Vec<String>,
    pub context_after: Vec<String>,
}

/// What an editor's command did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Edited {
    /// For people: the numbered lines around the change.
    pub output: String,
    /// Whether the file was there before.
    pub prev_exist: bool,
    pub old_content: Option<String>,
    pub new_content: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FileStat {
    pub size: u64,
    /// Octal, such as `644`.
    pub permissions: String,
    pub is_directory: bool,
    pub is_symlink: bool,
    /// Seconds since the epoch.
    pub modified_time: String,
}

/// Why an operation was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub kind: FaultKind,
    /// The system's word for it, when it was a call that failed.
    pub errno: Option<i32>,
    /// A sentence, when it was not.
    pub text: String,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    NotFound,
    PermissionDenied,
    AlreadyExists,
    BadRequest,
    /// A `bad_request` about the editor's anchor.
    Anchor,
    InvalidPath,
    InvalidTarget,
    DecodeError,
    NoSpaceLeft,
    TimedOut,
    Other,
}

impl Fault {
    pub fn text(kind: FaultKind, text: impl Into<String>) -> Fault {
        Fault { kind, errno: None, text: text.into() }
    }

    pub fn errno(errno: rustix::io::Errno) -> Fault {
        use rustix::io::Errno;
        let kind = match errno {
            Errno::NOENT => FaultKind::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => FaultKind::PermissionDenied,
            Errno::EXIST => FaultKind::AlreadyExists,
            Errno::NAMETOOLONG | Errno::LOOP | Errno::NOTDIR | Errno::INVAL => FaultKind::InvalidPath,
            Errno::ISDIR | Errno::NOTEMPTY | Errno::NXIO | Errno::BUSY | Errno::TXTBSY => {
                FaultKind::InvalidTarget
            }
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => FaultKind::NoSpaceLeft,
            _ => FaultKind::Other,
        };
        Fault { kind, errno: Some(errno.raw_os_error()), text: String::new() }
    }

    pub fn timed_out() -> Fault {
        Fault::text(FaultKind::TimedOut, "the operation took longer than it may")
    }
}

impl From<rustix::io::Errno> for Fault {
    fn from(errno: rustix::io::Errno) -> Fault {
        Fault::errno(errno)
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Fault {
        match rustix::io::Errno::from_io_error(&error) {
            Some(errno) => Fault::errno(errno),
            None => Fault::text(FaultKind::Other, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_survives_its_packets() {
        let op = Op::Write { path: "/tmp/x".to_owned(), append: true };
        let call = Call { op, time_ms_max: 5 };
        let content = vec![7_u8; 3 * FRAME_BYTES_MAX + 1];
        let message = join(&call, &content);
        let mut joined = Vec::new();
        let mut kinds = Vec::new();
        for packet in packets(9, Kind::End, &message) {
            assert!(packet.len() <= HEADER_BYTES + FRAME_BYTES_MAX);
            let (header, payload) = Header::split(&packet).expect("a frame");
            assert_eq!(header.id, 9);
            kinds.push(header.kind);
            joined.extend_from_slice(payload);
        }
        assert_eq!(kinds, [Kind::Part, Kind::Part, Kind::Part, Kind::End]);
        let (read, bytes) = split::<Call>(&joined).expect("a message");
        assert_eq!((read, bytes), (call, &content[..]));
    }

    #[test]
    fn a_message_of_nothing_is_one_packet() {
        let all: Vec<_> = packets(1, Kind::Cancel, &[]).collect();
        assert_eq!(all.len(), 1);
        assert_eq!(Header::split(&all[0]), Ok((Header { id: 1, kind: Kind::Cancel }, &[][..])));
    }

    proptest! {
        #[test]
        fn no_packet_and_no_message_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Header::split(&bytes);
            let _ = split::<Answered>(&bytes);
        }
    }
}
