//! The tools: what they are called, what they take and what they say of themselves.
#![forbid(unsafe_code)]

use std::sync::Arc;

use rmcp::handler::server::common::{schema_for_input, schema_for_output};
use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::files::{FileList, Uploaded};
use super::place::Fault;
use super::run::RunAnswer;
use crate::server::answer::in_short;

pub(super) const EXECUTE: &str = "execute_code";
pub(super) const COMMAND: &str = "run_command";
pub(super) const UPLOAD: &str = "upload_file";
pub(super) const LIST: &str = "list_files";
pub(super) const READ: &str = "read_file";
pub(super) const DELETE: &str = "delete_file";
pub(super) const RESET: &str = "reset_session";

/// Arguments of `execute_code`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ExecuteArgs {
    /// The program. In Python, the value of a last expression is shown, and names stay for the next call.
    pub(super) code: String,
    /// The language; python when left out.
    pub(super) language: Option<String>,
    /// The program's command-line arguments.
    #[serde(default)]
    pub(super) args: Vec<String>,
    /// Seconds after which the program is ended; the most there may be when left out.
    #[schemars(range(min = 0.1))]
    pub(super) timeout_seconds: Option<f64>,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments of `run_command`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct CommandArgs {
    /// What a Bash is to run, in /mnt/data. Each call is a new shell.
    pub(super) command: String,
    /// Seconds after which the command is ended; the most there may be when left out.
    #[schemars(range(min = 0.1))]
    pub(super) timeout_seconds: Option<f64>,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments of `upload_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct UploadArgs {
    /// Where the file is to lie, relative to /mnt/data, such as data.csv or in/data.csv.
    pub(super) path: String,
    /// The file's content, or its bytes in base64: see `encoding`.
    pub(super) content: String,
    /// How `content` is written.
    #[serde(default)]
    pub(super) encoding: UploadEncoding,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(super) enum UploadEncoding {
    #[default]
    Text,
    Base64,
}

/// Arguments of `list_files`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ListArgs {
    /// Only what lies in this folder, relative to /mnt/data.
    pub(super) folder: Option<String>,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments of `read_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ReadArgs {
    /// The file, relative to /mnt/data.
    pub(super) path: String,
    /// The first byte to read.
    #[serde(default)]
    pub(super) offset: u64,
    /// How many bytes to read; all of them when left out.
    pub(super) length: Option<u64>,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments of `delete_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct DeleteArgs {
    /// The file, relative to /mnt/data.
    pub(super) path: String,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments of `reset_session`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct ResetArgs {
    /// Deletes every file of the session as well.
    #[serde(default)]
    pub(super) delete_files: bool,
    /// Works in the session of this name instead of the connection's own: 1 to 128 letters, digits or ._:@-
    pub(super) session: Option<String>,
}

/// Arguments as their type, or what is wrong with them.
pub(super) fn arguments<T: DeserializeOwned>(given: Option<JsonObject>) -> Result<T, Fault> {
    serde_json::from_value(Value::Object(given.unwrap_or_default()))
        .map_err(|error| Fault(in_short(format_args!("the arguments do not fit: {error}"))))
}

/// Every tool. `languages` are those that can be run here.
pub(super) fn all(languages: &[String]) -> Vec<Tool> {
    let hints = |title: &str| ToolAnnotations::with_title(title).open_world(false);
    let changes = |title: &str| hints(title).read_only(false);
    vec![
        with_languages(
            Tool::new(EXECUTE, execute_description(languages), schema::<ExecuteArgs>())
                .with_title("Run code")
                .with_raw_output_schema(plain(schema_for_output::<RunAnswer>()))
                .annotate(changes("Run code").destructive(true).idempotent(false)),
            languages,
        ),
        Tool::new(
            COMMAND,
            "Runs a shell command (Bash) in the session's sandbox, in /mnt/data, and returns its output and exit \
             code. Files stay for later calls; shell variables and background processes do not. No network.",
            schema::<CommandArgs>(),
        )
        .with_title("Run a command")
        .with_raw_output_schema(plain(schema_for_output::<RunAnswer>()))
        .annotate(changes("Run a command").destructive(true).idempotent(false)),
        Tool::new(
            UPLOAD,
            "Puts a file into the session's /mnt/data, where code and commands find it. A file of the same path is \
             replaced.",
            schema::<UploadArgs>(),
        )
        .with_title("Upload a file")
        .with_raw_output_schema(plain(schema_for_output::<Uploaded>()))
        .annotate(changes("Upload a file").destructive(true).idempotent(true)),
        Tool::new(
            LIST,
            "Lists the files of the session's /mnt/data: those that were uploaded and those that runs have left.",
            schema::<ListArgs>(),
        )
        .with_title("List files")
        .with_raw_output_schema(plain(schema_for_output::<FileList>()))
        .annotate(hints("List files").read_only(true)),
        Tool::new(
            READ,
            "Reads a file of the session's /mnt/data: text as text, a picture as a picture, anything else as base64. \
             At most 32 MiB at once; `offset` and `length` read a part.",
            schema::<ReadArgs>(),
        )
        .with_title("Read a file")
        .annotate(hints("Read a file").read_only(true)),
        Tool::new(DELETE, "Deletes a file of the session's /mnt/data.", schema::<DeleteArgs>())
            .with_title("Delete a file")
            .annotate(changes("Delete a file").destructive(true).idempotent(true)),
        Tool::new(
            RESET,
            "Starts the session's Python anew: variables, imports and functions of earlier calls are gone. Files stay, \
             unless `delete_files` is true.",
            schema::<ResetArgs>(),
        )
        .with_title("Reset the session")
        .annotate(changes("Reset the session").destructive(true).idempotent(true)),
    ]
}

fn execute_description(languages: &[String]) -> String {
    format!(
        "Runs a program in a confined sandbox and returns what it printed, its exit code and the files it left. \
         Languages: {}. Python keeps variables and imports from call to call of a session; in the other languages each \
         call is a fresh program. Every call finds the session's files in /mnt/data, which is the working folder; what \
         it writes there stays, pictures are shown. No network.",
        languages.join(", ")
    )
}

fn schema<T: JsonSchema + 'static>() -> Arc<JsonObject> {
    plain(schema_for_input::<T>().expect("arguments are an object"))
}

/// Without what some models' providers refuse: unions with null, which a field that may be missing does not need, and
/// formats of numbers.
fn plain(schema: Arc<JsonObject>) -> Arc<JsonObject> {
    fn walk(value: &mut Value) {
        if let Value::Object(fields) = value {
            fields.remove("format");
            if fields.get("default").is_some_and(Value::is_null) {
                fields.remove("default");
            }
            if let Some(Value::Array(types)) = fields.get("type")
                && let [one, other] = types.as_slice()
                && other == "null"
            {
                let one = one.clone();
                fields.insert("type".to_owned(), one);
            }
            fields.values_mut().for_each(walk);
        }
    }
    let mut schema = Value::Object((*schema).clone());
    walk(&mut schema);
    match schema {
        Value::Object(fields) => Arc::new(fields),
        _ => Arc::default(),
    }
}

/// Names the languages in the schema too.
fn with_languages(mut tool: Tool, languages: &[String]) -> Tool {
    let mut schema = (*tool.input_schema).clone();
    if let Some(language) = schema.get_mut("properties").and_then(|fields| fields.get_mut("language"))
        && let Some(language) = language.as_object_mut()
    {
        language.insert("examples".to_owned(), json!(languages));
    }
    tool.input_schema = Arc::new(schema);
    tool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tool_says_what_it_takes_and_does() {
        let tools = all(&["python".to_owned(), "bash".to_owned()]);
        let names: Vec<_> = tools.iter().map(|tool| tool.name.as_ref()).collect();
        assert_eq!(names, [EXECUTE, COMMAND, UPLOAD, LIST, READ, DELETE, RESET]);
        for tool in &tools {
            let schema = serde_json::to_value(&*tool.input_schema).unwrap();
            assert_eq!(schema["type"], "object", "{}", tool.name);
            for (name, field) in schema["properties"].as_object().unwrap() {
                assert!(
                    field["description"].as_str().is_some_and(|it| it.len() > 10),
                    "{} {name}",
                    tool.name
                );
            }
            let hints = tool.annotations.as_ref().unwrap();
            assert_eq!(hints.open_world_hint, Some(false), "{}", tool.name);
            assert_eq!(hints.read_only_hint, Some([LIST, READ].contains(&&*tool.name)), "{}", tool.name);
        }
        let text = serde_json::to_string(&tools).unwrap();
        assert!(!text.contains("\"null\"") && !text.contains("\"format\""), "{text}");
        let language = &tools[0].input_schema["properties"]["language"];
        assert_eq!(language["examples"], json!(["python", "bash"]));
    }

    #[test]
    fn bad_arguments_are_named() {
        let object = |value: Value| value.as_object().cloned();
        let fault = arguments::<ExecuteArgs>(object(json!({"language": "python"}))).unwrap_err();
        assert!(fault.0.contains("missing field `code`"), "{fault}");
        let fault = arguments::<ReadArgs>(object(json!({"path": "a", "offset": -1}))).unwrap_err();
        assert!(fault.0.contains("-1"), "{fault}");
        let long = json!({"path": "a", "offset": "x".repeat(1_000_000)});
        assert!(arguments::<ReadArgs>(object(long)).unwrap_err().0.len() < 1024, "not all of it is repeated");
        assert!(arguments::<ListArgs>(None).is_ok());
        assert!(
            arguments::<ResetArgs>(object(json!({"unknown": 1}))).is_ok(),
            "what a model adds is no fault"
        );
    }
}
