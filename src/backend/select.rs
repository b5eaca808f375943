//! Chooses backend and profile for a cell: endpoint, kernel, native, in that order of preference. This build
//! has the native backend only, so `auto` means native and code/info says so.
#![forbid(unsafe_code)]

use crate::engine::{Language, Refusal};
use crate::launcher::plan::Profile;
use crate::launcher::posture::{Hello, RuntimeReport};

/// Modules that the `python-data` zygote holds loaded. A mention in the first cell is hint enough: a wrong
/// guess costs time only.
const DATA_MODULES: [&str; 5] = ["numpy", "pandas", "matplotlib", "scipy", "IPython"];

/// The layer that runs a language.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    Native,
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Backend::Native => "native",
        }
    }
}

/// The interpreter of a language, if the launcher found one.
pub fn runtime(hello: &Hello, language: Language) -> Option<&RuntimeReport> {
    match language {
        Language::Python => hello.python.as_ref(),
        Language::JavaScript => hello.node.as_ref(),
    }
}

/// The backend of a language. `looked_for` is the binary's name for the message.
pub fn backend(hello: &Hello, language: Language, looked_for: &str) -> Result<Backend, Refusal> {
    match runtime(hello, language) {
        Some(_) => Ok(Backend::Native),
        None => Err(Refusal::NoInterpreter { language: language.name(), looked_for: looked_for.to_owned() }),
    }
}

/// The profile whose preloaded modules fit the first cell.
pub fn profile(hello: &Hello, language: Language, first_code: &str) -> Profile {
    match language {
        Language::JavaScript => Profile::Node,
        Language::Python => {
            let wants_data = || DATA_MODULES.iter().any(|module| first_code.contains(module));
            if hello.warm.contains(&Profile::PythonData) && wants_data() {
                Profile::PythonData
            } else {
                Profile::Python
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::native::fake::hello;

    #[test]
    fn the_first_cell_picks_the_profile_by_the_modules_it_names() {
        let mut hello = hello();
        assert_eq!(profile(&hello, Language::Python, "print(1)"), Profile::Python);
        assert_eq!(profile(&hello, Language::Python, "import pandas as pd"), Profile::PythonData);
        assert_eq!(profile(&hello, Language::JavaScript, "// numpy"), Profile::Node);
        hello.warm.clear();
        assert_eq!(profile(&hello, Language::Python, "import pandas as pd"), Profile::Python);
    }

    #[test]
    fn a_language_without_interpreter_says_what_was_looked_for() {
        let hello = Hello { node: None, ..hello() };
        let refusal = backend(&hello, Language::JavaScript, "node").expect_err("no node");
        assert_eq!(refusal.to_string(), "No interpreter for javascript: node was not found");
        assert_eq!(backend(&hello, Language::Python, "python3"), Ok(Backend::Native));
    }
}
