//! Requests of the file routes, both generations. What they answer with is in [`crate::files::wire`].
#![forbid(unsafe_code)]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use utoipa::{IntoParams, ToSchema};

use super::refuse::Invalid;
use crate::files::Owner;
use crate::files::wire::{
    Edit, GLOB_ENTRIES_MAX, GREP_FILE_BYTES_MAX, GREP_FILE_BYTES_USUAL, GREP_MATCHES_USUAL, Glob, Grep, List,
    Occurrence, Op, Sort,
};
use crate::server::fields::{FieldError, Fields};

/// A request that was read: what to do, with what content, for whom, and under which name errors speak of it.
#[derive(Debug, PartialEq)]
pub(super) struct Asked {
    pub(super) op: Op,
    pub(super) content: Vec<u8>,
    /// The path as the caller wrote it.
    pub(super) path: String,
    pub(super) who: Who,
}

/// Whose files what is created becomes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Who {
    user: Option<String>,
    sudo: bool,
}

/// The query of a v2 route that has a body too.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "the document's shape of what `Who::of_query` reads")]
pub(super) struct UserQuery {
    /// Account of the sandbox that owns what is created
    user: Option<String>,
}

impl Who {
    pub(super) fn owner(&self) -> Owner<'_> {
        match &self.user {
            Some(user) => Owner::Named(user),
            None if self.sudo => Owner::Sudo,
            None => Owner::Default,
        }
    }

    /// `?user=` of a v2 route.
    pub(super) fn of_query(query: Option<&str>) -> Who {
        let user = Fields::of_query(query, &["user"]).text("user");
        Who { user: user.filter(|user| !user.is_empty()), sudo: false }
    }

    fn sudo(sudo: Option<bool>) -> Who {
        Who { user: None, sudo: sudo.unwrap_or(false) }
    }
}

/// Why a request is not taken.
#[derive(Debug, PartialEq)]
pub(super) enum NotTaken {
    /// It does not say what to do.
    Invalid(Invalid),
    /// It does, and this route does not do that; a sentence for people.
    Refused(String),
}

impl From<Invalid> for NotTaken {
    fn from(invalid: Invalid) -> NotTaken {
        NotTaken::Invalid(invalid)
    }
}

pub(super) type Parsed = Result<Asked, NotTaken>;

fn asked(path: String, who: Who, op: Op) -> Parsed {
    Ok(Asked { op, content: Vec::new(), path, who })
}

fn unusable(field: &'static str, kind: &'static str, message: impl Into<String>) -> NotTaken {
    NotTaken::Invalid(Invalid::reason(FieldError::in_body(field, kind, message)))
}

/// One of a few words; another one is refused.
fn choice<T: Copy>(
    word: Option<&str>,
    field: &'static str,
    known: &[(&str, T)],
) -> Result<Option<T>, NotTaken> {
    let Some(word) = word else { return Ok(None) };
    let found = known.iter().find(|(name, _)| name.eq_ignore_ascii_case(word));
    match found {
        Some((_, value)) => Ok(Some(*value)),
        None => {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            Err(unusable(field, "enum", format!("field `{field}` must be one of {}", names.join(", "))))
        }
    }
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Encoding {
    Utf8,
    Base64,
    /// One byte for each character.
    Raw,
}

const ENCODINGS: [(&str, Encoding); 4] = [
    ("utf-8", Encoding::Utf8),
    ("utf8", Encoding::Utf8),
    ("base64", Encoding::Base64),
    ("raw", Encoding::Raw),
];
const SORTS: [(&str, Sort); 5] = [
    ("name", Sort::Name),
    ("path", Sort::Path),
    ("size", Sort::Size),
    ("modified", Sort::Modified),
    ("type", Sort::Type),
];
const MODES: [(&str, Occurrence); 3] =
    [("ALL", Occurrence::All), ("FIRST", Occurrence::First), ("LAST", Occurrence::Last)];

/// A field of a request, taken by its type.
trait Field: Sized {
    /// `None` once an error was noted.
    fn take(fields: &mut Fields, name: &'static str) -> Option<Self>;
}

impl Field for String {
    fn take(fields: &mut Fields, name: &'static str) -> Option<String> {
        fields.required_text(name)
    }
}

impl Field for Option<String> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<String>> {
        Some(fields.text(name))
    }
}

impl Field for Option<bool> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<bool>> {
        Some(fields.boolean(name))
    }
}

impl Field for Option<u64> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<u64>> {
        Some(fields.count(name))
    }
}

impl Field for Option<Vec<String>> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<Vec<String>>> {
        Some(fields.texts(name))
    }
}

impl Field for Option<Vec<i64>> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<Vec<i64>>> {
        Some(fields.integers(name))
    }
}

/// Declares a request once: its fields as the document shows them are the ones that are read.
macro_rules! request {
    ($(#[$about:meta])* $name:ident { $($(#[$note:meta])* $field:ident as $key:literal: $type:ty,)* }) => {
        $(#[$about])*
        pub(super) struct $name { $($(#[$note])* $field: $type,)* }

        impl $name {
            const FIELDS: &[&'static str] = &[$($key),*];

            /// Takes all fields, so that every bad one is named.
            fn take(mut fields: Fields) -> Result<$name, NotTaken> {
                $(let $field = <$type as Field>::take(&mut fields, $key);)*
                let errors = fields.into_errors();
                match ($($field,)*) {
                    ($(Some($field),)*) if errors.is_empty() => Ok($name { $($field,)* }),
                    _ => Err(Invalid::schema(errors).into()),
                }
            }
        }
    };
}

/// Requests of which a URL's query is the whole.
macro_rules! of_query {
    ($($name:ident),*) => { $(
        impl $name {
            fn of_query(query: Option<&str>) -> Result<$name, NotTaken> {
                $name::take(Fields::of_query(query, $name::FIELDS))
            }
        }
    )* };
}

of_query!(ReadQuery, ListQuery, StatQuery, SearchQuery, PathQuery);

/// Requests that are a JSON body.
macro_rules! of_body {
    ($($name:ident),*) => { $(
        impl $name {
            fn of_body(body: &[u8]) -> Result<$name, NotTaken> {
                let fields = Fields::parse(body, $name::FIELDS);
                $name::take(fields.map_err(|error| Invalid::schema(vec![error]))?)
            }
        }
    )* };
}

of_body!(V1ReadRequest, V1WriteRequest, V1ListRequest, V1FindRequest, V1GlobRequest, V1SearchRequest);
of_body!(V1ReplaceRequest, V1StatRequest, GrepRequest, EditRequest, MkdirRequest, TransferRequest);
of_body!(DeleteRequest);

request! {
    #[derive(Debug, IntoParams)]
    #[into_params(parameter_in = Query)]
    ReadQuery {
        path as "path": String,
        /// From 0.
        start_line as "start_line": Option<u64>,
        /// The first line that is not read.
        end_line as "end_line": Option<u64>,
    }
}

impl ReadQuery {
    pub(super) fn parse(query: Option<&str>) -> Parsed {
        let Self { path, start_line, end_line } = Self::of_query(query)?;
        asked(path.clone(), Who::of_query(query), Op::Read { path, start_line, end_line })
    }
}

request! {
    #[derive(Debug, IntoParams)]
    #[into_params(parameter_in = Query)]
    ListQuery {
        path as "path": String,
        recursive as "recursive": Option<bool>,
        /// Default true.
        show_hidden as "show_hidden": Option<bool>,
        /// Levels below the folder; 1 is what lies in it.
        max_depth as "max_depth": Option<u64>,
    }
}

impl ListQuery {
    pub(super) fn parse(query: Option<&str>) -> Parsed {
        let it = Self::of_query(query)?;
        let list = List {
            path: it.path.clone(),
            recursive: it.recursive.unwrap_or(false),
            hidden: it.show_hidden.unwrap_or(true),
            depth_max: it.max_depth,
            with_size: true,
            ..List::default()
        };
        asked(it.path, Who::of_query(query), Op::List(list))
    }
}

request! {
    #[derive(Debug, IntoParams)]
    #[into_params(parameter_in = Query)]
    StatQuery {
        path as "path": String,
        /// Default true.
        follow_symlinks as "follow_symlinks": Option<bool>,
    }
}

impl StatQuery {
    pub(super) fn parse(query: Option<&str>) -> Parsed {
        let Self { path, follow_symlinks } = Self::of_query(query)?;
        let follow = follow_symlinks.unwrap_or(true);
        asked(path.clone(), Who::of_query(query), Op::Stat { path, follow })
    }
}

request! {
    #[derive(Debug, IntoParams)]
    #[into_params(parameter_in = Query)]
    SearchQuery {
        path as "path": String,
        /// A glob such as `**/*.py`; without a slash it is of names, wherever they lie.
        pattern as "pattern": String,
    }
}

impl SearchQuery {
    pub(super) fn parse(query: Option<&str>) -> Parsed {
        let Self { path, pattern } = Self::of_query(query)?;
        asked(path.clone(), Who::of_query(query), Op::Find { path, pattern })
    }
}

request! {
    #[derive(Debug, IntoParams)]
    #[into_params(parameter_in = Query)]
    PathQuery {
        path as "path": String,
        /// `abort`: answer 409 rather than with a file that changed since, or that changes while it is read.
        change_policy as "change_policy": Option<String>,
    }
}

impl PathQuery {
    /// The path, and whether a change ends the transfer.
    pub(super) fn parse(query: Option<&str>) -> Result<(String, bool), NotTaken> {
        let Self { path, change_policy } = Self::of_query(query)?;
        Ok((path, change_policy.is_some_and(|policy| policy.eq_ignore_ascii_case("abort"))))
    }
}

request! {
    /// Read a file's text, or some of its lines.
    #[derive(Debug, ToSchema)]
    V1ReadRequest {
        file as "file": String,
        /// From 0.
        start_line as "start_line": Option<u64>,
        /// The first line that is not read.
        end_line as "end_line": Option<u64>,
        sudo as "sudo": Option<bool>,
    }
}

impl V1ReadRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let Self { file, start_line, end_line, sudo } = Self::of_body(body)?;
        asked(file.clone(), Who::sudo(sudo), Op::Read { path: file, start_line, end_line })
    }
}

request! {
    /// Write a file. Folders on the way are made.
    #[derive(Debug, ToSchema)]
    WriteRequest {
        path as "path": String,
        content as "content": String,
        /// `utf-8` (default), `base64`, or `raw`: one byte for each character.
        encoding as "encoding": Option<String>,
        append as "append": Option<bool>,
        /// With `utf-8` only.
        leading_newline as "leading_newline": Option<bool>,
        /// With `utf-8` only.
        trailing_newline as "trailing_newline": Option<bool>,
    }
}

request! {
    /// Write a file. Folders on the way are made.
    #[derive(Debug, ToSchema)]
    V1WriteRequest {
        file as "file": String,
        content as "content": String,
        /// `utf-8` (default), `base64`, or `raw`: one byte for each character.
        encoding as "encoding": Option<String>,
        append as "append": Option<bool>,
        /// With `utf-8` only.
        leading_newline as "leading_newline": Option<bool>,
        /// With `utf-8` only.
        trailing_newline as "trailing_newline": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl V1WriteRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let it = Self::of_body(body)?;
        let who = Who::sudo(it.sudo);
        let Self { file, content, encoding, append, leading_newline, trailing_newline, .. } = it;
        WriteRequest { path: file, content, encoding, append, leading_newline, trailing_newline }
            .into_asked(who)
    }
}

impl WriteRequest {
    /// Extra fields are refused here, by the published schema.
    pub(super) fn parse(body: &[u8], query: Option<&str>) -> Parsed {
        let fields = Fields::parse(body, Self::FIELDS);
        let mut fields = fields.map_err(|error| Invalid::schema(vec![error]))?;
        fields.refuse_unknown();
        Self::take(fields)?.into_asked(Who::of_query(query))
    }

    fn into_asked(self, who: Who) -> Parsed {
        let encoding = choice(self.encoding.as_deref(), "encoding", &ENCODINGS)?.unwrap_or(Encoding::Utf8);
        let content = match encoding {
            Encoding::Utf8 => {
                let newline = |flag: Option<bool>| if flag == Some(true) { "\n" } else { "" };
                [newline(self.leading_newline), &self.content, newline(self.trailing_newline)]
                    .concat()
                    .into_bytes()
            }
            Encoding::Base64 => BASE64.decode(self.content.trim().as_bytes()).map_err(|error| {
                unusable("content", "value_error.base64", format!("content is not base64: {error}"))
            })?,
            Encoding::Raw => latin1(&self.content)?,
        };
        let op = Op::Write { path: self.path.clone(), append: self.append.unwrap_or(false) };
        Ok(Asked { op, content, path: self.path, who })
    }
}

fn latin1(text: &str) -> Result<Vec<u8>, NotTaken> {
    let bytes: Result<Vec<u8>, _> =
        text.chars().map(|character| u8::try_from(u32::from(character))).collect();
    bytes.map_err(|_| {
        unusable(
            "content",
            "value_error.raw",
            "content with encoding raw must hold characters up to U+00FF only",
        )
    })
}

request! {
    /// List a folder.
    #[derive(Debug, ToSchema)]
    V1ListRequest {
        path as "path": String,
        recursive as "recursive": Option<bool>,
        /// Default true.
        show_hidden as "show_hidden": Option<bool>,
        /// Extensions such as `.py`.
        file_types as "file_types": Option<Vec<String>>,
        /// Levels below the folder; 1 is what lies in it.
        max_depth as "max_depth": Option<u64>,
        /// Default true.
        include_size as "include_size": Option<bool>,
        include_permissions as "include_permissions": Option<bool>,
        /// `name`, `path` (default), `size`, `modified` or `type`.
        sort_by as "sort_by": Option<String>,
        sort_desc as "sort_desc": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl V1ListRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let it = Self::of_body(body)?;
        let list = List {
            path: it.path.clone(),
            recursive: it.recursive.unwrap_or(false),
            hidden: it.show_hidden.unwrap_or(true),
            depth_max: it.max_depth,
            extensions: it.file_types.unwrap_or_default(),
            with_size: it.include_size.unwrap_or(true),
            with_permissions: it.include_permissions.unwrap_or(false),
            sort: choice(it.sort_by.as_deref(), "sort_by", &SORTS)?.unwrap_or_default(),
            descending: it.sort_desc.unwrap_or(false),
        };
        asked(it.path, Who::sudo(it.sudo), Op::List(list))
    }
}

request! {
    /// Find files by name.
    #[derive(Debug, ToSchema)]
    V1FindRequest {
        path as "path": String,
        /// Without a slash it is of names, wherever they lie.
        glob as "glob": String,
        sudo as "sudo": Option<bool>,
    }
}

impl V1FindRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let Self { path, glob, sudo } = Self::of_body(body)?;
        asked(path.clone(), Who::sudo(sudo), Op::Find { path, pattern: glob })
    }
}

request! {
    /// Find files by their path below a folder.
    #[derive(Debug, ToSchema)]
    V1GlobRequest {
        path as "path": String,
        /// Such as `src/**/*.py`.
        pattern as "pattern": String,
        exclude as "exclude": Option<Vec<String>>,
        /// Default false.
        include_hidden as "include_hidden": Option<bool>,
        /// Default true.
        files_only as "files_only": Option<bool>,
        /// Default true.
        include_metadata as "include_metadata": Option<bool>,
        /// At most 5,000.
        max_results as "max_results": Option<u64>,
        /// `path` (default), `name`, `size` or `modified`.
        sort_by as "sort_by": Option<String>,
        sort_desc as "sort_desc": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl V1GlobRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let it = Self::of_body(body)?;
        let glob = Glob {
            path: it.path.clone(),
            pattern: it.pattern,
            exclude: it.exclude.unwrap_or_default(),
            hidden: it.include_hidden.unwrap_or(false),
            files_only: it.files_only.unwrap_or(true),
            with_metadata: it.include_metadata.unwrap_or(true),
            results_max: as_size(it.max_results, GLOB_ENTRIES_MAX),
            sort: choice(it.sort_by.as_deref(), "sort_by", &SORTS)?.unwrap_or_default(),
            descending: it.sort_desc.unwrap_or(false),
        };
        asked(it.path, Who::sudo(it.sudo), Op::Glob(glob))
    }
}

fn as_size(value: Option<u64>, usual: usize) -> usize {
    value.map_or(usual, |value| usize::try_from(value).unwrap_or(usize::MAX))
}

request! {
    /// Search what files hold.
    #[derive(Debug, ToSchema)]
    GrepRequest {
        /// A folder or a file.
        path as "path": String,
        pattern as "pattern": String,
        #[schema(ignore)]
        sudo as "sudo": Option<bool>,
        /// Globs of the files to look into.
        include as "include": Option<Vec<String>>,
        exclude as "exclude": Option<Vec<String>>,
        case_insensitive as "case_insensitive": Option<bool>,
        /// `pattern` is text and no expression.
        fixed_strings as "fixed_strings": Option<bool>,
        context_before as "context_before": Option<u64>,
        context_after as "context_after": Option<u64>,
        /// Default 500, at most 10,000.
        max_results as "max_results": Option<u64>,
        /// Larger files are passed over: bytes, or a text such as `500K` or `1M` (default), at most 16 MiB.
        #[schema(value_type = Option<String>)]
        max_file_size as "max_file_size": Option<FileSize>,
        /// `.` fits newlines, and a match may have several lines.
        multiline as "multiline": Option<bool>,
        /// Matches to pass over.
        offset as "offset": Option<u64>,
        /// One of ripgrep's file types, such as `py`.
        #[schema(rename = "type")]
        file_type as "type": Option<String>,
        /// Default true.
        recursive as "recursive": Option<bool>,
    }
}

impl GrepRequest {
    /// `query` is that of a v2 route.
    pub(super) fn parse(body: &[u8], query: Option<&str>) -> Parsed {
        let it = Self::of_body(body)?;
        asked(it.path.clone(), either(query, it.sudo), Op::Grep(it.into_grep()))
    }

    fn into_grep(self) -> Grep {
        Grep {
            path: self.path,
            pattern: self.pattern,
            include: self.include.unwrap_or_default(),
            exclude: self.exclude.unwrap_or_default(),
            file_type: self.file_type.filter(|name| !name.is_empty()),
            case_insensitive: self.case_insensitive.unwrap_or(false),
            fixed_strings: self.fixed_strings.unwrap_or(false),
            multiline: self.multiline.unwrap_or(false),
            recursive: self.recursive.unwrap_or(true),
            context_before: as_size(self.context_before, 0),
            context_after: as_size(self.context_after, 0),
            offset: as_size(self.offset, 0),
            results_max: as_size(self.max_results, GREP_MATCHES_USUAL),
            file_bytes_max: self
                .max_file_size
                .map_or(GREP_FILE_BYTES_USUAL, |it| it.0)
                .min(GREP_FILE_BYTES_MAX),
        }
    }
}

/// Bytes as a number, or a text such as `500K` or `1M`.
#[derive(Debug)]
struct FileSize(u64);

impl Field for Option<FileSize> {
    fn take(fields: &mut Fields, name: &'static str) -> Option<Option<FileSize>> {
        let Some(text) = fields.number_or_text(name) else { return Some(None) };
        let text = text.trim().to_ascii_uppercase();
        let text = text.trim_end_matches('B').trim_end_matches('I');
        let (digits, unit) = match text.char_indices().next_back() {
            Some((at, 'K')) => (&text[..at], 1024),
            Some((at, 'M')) => (&text[..at], 1024 * 1024),
            Some((at, 'G')) => (&text[..at], 1024 * 1024 * 1024),
            _ => (text, 1),
        };
        let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        if bytes.is_none() {
            let message = format!("field `{name}` must be a number of bytes or a text such as 500K or 1M");
            fields.reject(FieldError::in_body(name, "value_error", message));
        }
        Some(bytes.map(FileSize))
    }
}

request! {
    /// Search one file line by line.
    #[derive(Debug, ToSchema)]
    V1SearchRequest {
        file as "file": String,
        regex as "regex": String,
        sudo as "sudo": Option<bool>,
    }
}

impl V1SearchRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let Self { file, regex, sudo } = Self::of_body(body)?;
        asked(file.clone(), Who::sudo(sudo), Op::Search { path: file, regex })
    }
}

request! {
    /// Replace a text wherever it stands in a file.
    #[derive(Debug, ToSchema)]
    V1ReplaceRequest {
        file as "file": String,
        old_str as "old_str": String,
        new_str as "new_str": String,
        sudo as "sudo": Option<bool>,
    }
}

impl V1ReplaceRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let Self { file, old_str, new_str, sudo } = Self::of_body(body)?;
        asked(file.clone(), Who::sudo(sudo), Op::Replace { path: file, old: old_str, new: new_str })
    }
}

request! {
    /// A command of the editor.
    #[derive(Debug, ToSchema)]
    EditRequest {
        /// `str_replace`, `insert` or `undo_edit`; on v1 also `view` and `create`.
        command as "command": String,
        path as "path": String,
        /// What `create` writes.
        file_text as "file_text": Option<String>,
        old_str as "old_str": Option<String>,
        /// What comes in its place, or is inserted.
        new_str as "new_str": Option<String>,
        /// `insert`: after that many lines.
        insert_line as "insert_line": Option<u64>,
        /// `view`: first and last line from 1; -1 is the end.
        view_range as "view_range": Option<Vec<i64>>,
        /// Which of several occurrences: `ALL`, `FIRST` or `LAST`.
        replace_mode as "replace_mode": Option<String>,
        sudo as "sudo": Option<bool>,
    }
}

impl EditRequest {
    pub(super) fn parse_v1(body: &[u8]) -> Parsed {
        let it = Self::of_body(body)?;
        let who = Who::sudo(it.sudo);
        it.into_asked(who)
    }

    pub(super) fn parse_v2(body: &[u8], query: Option<&str>) -> Parsed {
        let it = Self::of_body(body)?;
        let use_instead = match it.command.as_str() {
            "view" => "GET /v2/fs/read",
            "create" => "POST /v2/fs/write",
            _ => return it.into_asked(Who::of_query(query)),
        };
        Err(NotTaken::Refused(format!("command '{}' is not available here; use {use_instead}", it.command)))
    }

    fn into_asked(self, who: Who) -> Parsed {
        let edit = match self.command.as_str() {
            "view" => Edit::View { range: view_range(self.view_range.as_deref())? },
            "create" => Edit::Create { text: needed(self.file_text, "file_text")? },
            "str_replace" => Edit::Replace {
                old: needed(self.old_str, "old_str")?,
                new: self.new_str.unwrap_or_default(),
                mode: choice(self.replace_mode.as_deref(), "replace_mode", &MODES)?,
            },
            "insert" => Edit::Insert {
                line: needed(self.insert_line, "insert_line")?,
                text: needed(self.new_str, "new_str")?,
            },
            "undo_edit" => Edit::Undo,
            _ => {
                let message = "field `command` must be one of view, create, str_replace, insert, undo_edit";
                return Err(unusable("command", "enum", message));
            }
        };
        asked(self.path.clone(), who, Op::Edit { path: self.path, edit })
    }
}

fn needed<T>(value: Option<T>, field: &'static str) -> Result<T, NotTaken> {
    value.ok_or_else(|| {
        let error = FieldError::in_body(field, "value_error.missing", format!("missing field `{field}`"));
        Invalid::schema(vec![error]).into()
    })
}

fn view_range(range: Option<&[i64]>) -> Result<Option<(u64, i64)>, NotTaken> {
    match range {
        None => Ok(None),
        Some(&[first, last]) if first >= 1 && last >= -1 => Ok(Some((first.cast_unsigned(), last))),
        Some(_) => {
            let message = "field `view_range` must be two line numbers from 1; the last may be -1";
            Err(unusable("view_range", "value_error.range", message))
        }
    }
}

request! {
    /// What a path names.
    #[derive(Debug, ToSchema)]
    V1StatRequest {
        path as "path": String,
        /// Default true.
        follow_symlinks as "follow_symlinks": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl V1StatRequest {
    pub(super) fn parse(body: &[u8]) -> Parsed {
        let Self { path, follow_symlinks, sudo } = Self::of_body(body)?;
        asked(path.clone(), Who::sudo(sudo), Op::Stat { path, follow: follow_symlinks.unwrap_or(true) })
    }
}

/// The two generations say `user` and `sudo` in different places.
fn either(query: Option<&str>, sudo: Option<bool>) -> Who {
    Who { sudo: sudo.unwrap_or(false), ..Who::of_query(query) }
}

request! {
    /// Make a folder.
    #[derive(Debug, ToSchema)]
    MkdirRequest {
        path as "path": String,
        /// Make those above it too, and take one that is there for made.
        parents as "parents": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl MkdirRequest {
    pub(super) fn parse(body: &[u8], query: Option<&str>) -> Parsed {
        let Self { path, parents, sudo } = Self::of_body(body)?;
        let op = Op::Mkdir { path: path.clone(), parents: parents.unwrap_or(false) };
        asked(path, either(query, sudo), op)
    }
}

request! {
    /// From where to where.
    #[derive(Debug, ToSchema)]
    TransferRequest {
        source as "source": String,
        destination as "destination": String,
        /// Take the place of what is there.
        overwrite as "overwrite": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl TransferRequest {
    pub(super) fn parse_copy(body: &[u8], query: Option<&str>) -> Parsed {
        let Self { source, destination, overwrite, sudo } = Self::of_body(body)?;
        let overwrite = overwrite.unwrap_or(false);
        asked(source.clone(), either(query, sudo), Op::Copy { source, destination, overwrite })
    }

    pub(super) fn parse_move(body: &[u8], query: Option<&str>) -> Parsed {
        let Self { source, destination, overwrite, sudo } = Self::of_body(body)?;
        let overwrite = overwrite.unwrap_or(false);
        asked(source.clone(), either(query, sudo), Op::Move { source, destination, overwrite })
    }
}

request! {
    /// Remove a file or a folder.
    #[derive(Debug, ToSchema)]
    DeleteRequest {
        path as "path": String,
        /// With all that a folder holds.
        recursive as "recursive": Option<bool>,
        sudo as "sudo": Option<bool>,
    }
}

impl DeleteRequest {
    pub(super) fn parse(body: &[u8], query: Option<&str>) -> Parsed {
        let Self { path, recursive, sudo } = Self::of_body(body)?;
        let op = Op::Delete { path: path.clone(), recursive: recursive.unwrap_or(false) };
        asked(path, either(query, sudo), op)
    }
}
