//! The languages that programs may be written in, ready to be run: names resolved, commands filled in, and which of
//! them a sandbox has.
//!
//! What a language is, is data (`policies/languages.toml`); nothing here knows one by name. Three kinds are run by an
//! interpreter that waits already, all others are programs: a source in a scratch folder, a command that compiles it
//! where there is one, a command that runs it.
#![forbid(unsafe_code)]

mod probe;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::policy::{Harness, LanguageEntry};

pub use probe::{Availability, Found};

/// Name of the compiled program in its scratch folder; a source is never called so.
const BINARY: &str = "main";
/// Where there is no folder of toolchains: nothing lies there.
const NO_TOOLCHAINS: &str = "/nonexistent";

/// What a table's words and values can name besides a program's own paths.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The folder that set-up made, as a sandbox sees it.
    pub toolchains: Option<String>,
    /// What a sandbox may use.
    pub memory_mib: u64,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub struct Languages {
    all: Vec<Arc<Language>>,
    by_name: HashMap<String, Arc<Language>>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Language {
    pub id: String,
    /// What a request may call it, in lower case.
    pub names: Vec<String>,
    pub title: String,
    pub runtime: Runtime,
    /// Its key in `/libraries`.
    pub library_key: Option<String>,
    detect: Detect,
}

/// How it is known to be installed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Detect {
    /// Programs on a sandbox's `PATH`.
    binaries: Vec<String>,
    /// Paths in a sandbox.
    files: Vec<String>,
    /// A command that prints its version.
    version: Vec<String>,
}

/// What runs its programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runtime {
    Python,
    JavaScript,
    TypeScript,
    Program(Program),
}

/// Commands over a source in a scratch folder. They start in the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// File name of the source.
    pub source: String,
    env: Vec<(String, String)>,
    /// The compiler's bound of its own, below that of the run.
    pub compile_time_max: Option<Duration>,
    /// Processor time of each command.
    cpu_seconds: Option<u32>,
    compile: Vec<String>,
    run: Vec<String>,
}

impl Languages {
    pub fn new(entries: &[LanguageEntry], surroundings: &Surroundings) -> Languages {
        let all: Vec<_> = entries.iter().map(|entry| Arc::new(Language::new(entry, surroundings))).collect();
        let named = all.iter().flat_map(|it| it.names.iter().map(|name| (name.clone(), Arc::clone(it))));
        Languages { by_name: named.collect(), all }
    }

    /// By any of its names, in any case.
    pub fn resolve(&self, lang: &str) -> Option<&Arc<Language>> {
        self.by_name.get(&lang.to_ascii_lowercase())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Language>> {
        self.all.iter()
    }

    /// Every name of every language, in the order of the table.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().flat_map(|it| it.names.iter().map(String::as_str))
    }
}

impl Language {
    fn new(entry: &LanguageEntry, surroundings: &Surroundings) -> Language {
        let toolchains = surroundings.toolchains.as_deref().unwrap_or(NO_TOOLCHAINS);
        let cache = entry.cache.as_deref().map_or_else(String::new, |name| format!("{toolchains}/{name}"));
        let memory = surroundings.memory_mib.to_string();
        let known = [("toolchains", toolchains), ("cache", &cache), ("memory_mib", &memory)];
        let fill =
            |words: &[String]| -> Vec<String> { words.iter().map(|word| filled(word, &known)).collect() };
        let program = || Program {
            source: entry.source.clone(),
            env: entry.env.iter().map(|(name, value)| (name.clone(), filled(value, &known))).collect(),
            compile_time_max: entry.compile_seconds.map(|seconds| Duration::from_secs(seconds.into())),
            cpu_seconds: entry.cpu_seconds,
            compile: fill(&entry.compile),
            run: fill(&entry.run),
        };
        Language {
            id: entry.id.clone(),
            names: entry.names.clone(),
            title: entry.title.clone(),
            runtime: match entry.harness {
                Some(Harness::Python) => Runtime::Python,
                Some(Harness::Javascript) => Runtime::JavaScript,
                Some(Harness::Typescript) => Runtime::TypeScript,
                None => Runtime::Program(program()),
            },
            library_key: entry.library_key.clone(),
            detect: Detect {
                binaries: fill(&entry.binaries),
                files: fill(&entry.files),
                version: fill(&entry.version),
            },
        }
    }
}

impl Language {
    /// Names of the programs that it needs; answers name no paths.
    pub fn binaries(&self) -> impl Iterator<Item = &str> {
        self.detect.binaries.iter().map(|path| probe::base_name(path))
    }
}

impl Program {
    /// The command that compiles the source in `dir`; `None` where nothing is compiled.
    pub fn compile_words(&self, dir: &str) -> Option<Vec<String>> {
        (!self.compile.is_empty()).then(|| self.words(&self.compile, dir))
    }

    /// The command that runs what lies in `dir`, with the program's arguments.
    pub fn run_words(&self, dir: &str, args: &[String]) -> Vec<String> {
        let mut words = self.words(&self.run, dir);
        words.extend_from_slice(args);
        words
    }

    /// Variables of both commands, over what a sandbox has anyway.
    pub fn env_in(&self, dir: &str) -> Vec<(String, Option<String>)> {
        let fill = |value: &String| Some(self.filled_in(value, dir));
        self.env.iter().map(|(name, value)| (name.clone(), fill(value))).collect()
    }

    fn filled_in(&self, text: &str, dir: &str) -> String {
        let (source, binary) = (format!("{dir}/{}", self.source), format!("{dir}/{BINARY}"));
        filled(text, &[("dir", dir), ("source", &source), ("binary", &binary)])
    }

    fn words(&self, words: &[String], dir: &str) -> Vec<String> {
        let bound = self
            .cpu_seconds
            .map(|seconds| ["prlimit".to_owned(), format!("--cpu={seconds}"), "--".to_owned()].into_iter());
        bound.into_iter().flatten().chain(words.iter().map(|word| self.filled_in(word, dir))).collect()
    }
}

/// `text` with the values of the placeholders in it, each looked at once.
fn filled(text: &str, known: &[(&str, &str)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let found = known.iter().find(|(name, _)| {
            from[1..].strip_prefix(name).is_some_and(|after| after.starts_with('}')) && !before.ends_with('$')
        });
        match found {
            Some((name, value)) => {
                out.push_str(value);
                rest = &from[name.len() + 2..];
            }
            None => {
                out.push('{');
                rest = &from[1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::policy;

    pub(crate) fn languages() -> Languages {
        let entries = policy::load(None).expect("they are part of the program").languages;
        let surroundings =
            Surroundings { toolchains: Some("/opt/caisson/toolchains".to_owned()), memory_mib: 512 };
        Languages::new(&entries, &surroundings)
    }

    fn program(languages: &Languages, lang: &str) -> Program {
        match &languages.resolve(lang).expect("it is in the table").runtime {
            Runtime::Program(program) => program.clone(),
            other => panic!("{lang}: {other:?}"),
        }
    }

    #[test]
    fn a_name_is_found_whatever_its_case_and_nothing_else_is() {
        let languages = languages();
        for name in ["C++", "cpp", "Cpp", "CPP"] {
            assert_eq!(languages.resolve(name).map(|it| it.id.as_str()), Some("cpp"), "{name}");
        }
        assert_eq!(languages.resolve("nodeJS").map(|it| &it.runtime), Some(&Runtime::JavaScript));
        assert_eq!(languages.resolve("TS").map(|it| &it.runtime), Some(&Runtime::TypeScript));
        for name in ["", " py", "py thon", "../py", "cobol", "ruby", "py\0"] {
            assert!(languages.resolve(name).is_none(), "{name:?}");
        }
        assert!(languages.names().count() >= 20);
    }

    #[test]
    fn commands_are_filled_in_and_end_with_the_arguments() {
        let languages = languages();
        let bash = program(&languages, "sh");
        assert_eq!(bash.compile_words("/tmp/run-1"), None);
        let args = ["a b".to_owned(), "{source}".to_owned()];
        assert_eq!(bash.run_words("/tmp/run-1", &args), ["bash", "/tmp/run-1/main.sh", "a b", "{source}"]);
        let cpp = program(&languages, "c++");
        let words = cpp.compile_words("/tmp/run-1").expect("it is compiled");
        assert!(words.contains(&"-I/opt/caisson/toolchains/cpp".to_owned()), "{words:?}");
        assert!(words.ends_with(&["/tmp/run-1/main".to_owned(), "/tmp/run-1/main.cpp".to_owned()]));
        assert_eq!(cpp.run_words("/tmp/run-1", &[]), ["/tmp/run-1/main"]);
        assert_eq!(cpp.compile_time_max, Some(Duration::from_secs(120)));
    }

    #[test]
    fn nothing_is_left_of_a_placeholder_in_any_language() {
        for language in languages().iter() {
            let Runtime::Program(program) = &language.runtime else { continue };
            let words = [program.run_words("/d", &[]), program.compile_words("/d").unwrap_or_default()];
            let values = program.env_in("/d").into_iter().filter_map(|(_, value)| value);
            for word in words.concat().into_iter().chain(values) {
                for name in policy::PLACEHOLDERS {
                    let left = format!("{{{name}}}");
                    assert!(
                        !word.replace(&format!("${left}"), "").contains(&left),
                        "{}: {word}",
                        language.id
                    );
                }
            }
        }
    }

    #[test]
    fn a_bound_of_processor_time_stands_before_the_command() {
        let mut program = program(&languages(), "bash");
        program.cpu_seconds = Some(7);
        assert_eq!(program.run_words("/d", &[]), ["prlimit", "--cpu=7", "--", "bash", "/d/main.sh"]);
    }

    #[test]
    fn only_what_is_known_is_filled_in() {
        let known = [("dir", "{source}"), ("source", "S")];
        assert_eq!(filled("{dir}/{source} ${dir} {other} {", &known), "{source}/S ${dir} {other} {");
    }
}
