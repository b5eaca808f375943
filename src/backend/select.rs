//! Chooses what runs a cell: an external endpoint, an embedded kernel, our own harness, in that order of preference.
#![forbid(unsafe_code)]

use crate::config::CodeBackend;
use crate::engine::{Language, Refusal, Runner, Tier};
use crate::launcher::plan::Profile;
use crate::launcher::posture::{Hello, RuntimeReport};

/// Modules that the `python-data` zygote holds loaded. A mention in the first cell is hint enough: a wrong
/// guess costs time only.
const DATA_MODULES: [&str; 5] = ["numpy", "pandas", "matplotlib", "scipy", "IPython"];

/// The interpreter of a language, if the launcher found one.
pub fn runtime(hello: &Hello, language: Language) -> Option<&RuntimeReport> {
    match language {
        Language::Python => hello.python.as_ref(),
        Language::JavaScript => hello.node.as_ref(),
    }
}

/// Names of the embedded kernels, the default one first.
pub fn kernels(hello: &Hello) -> Vec<String> {
    hello.kernels.iter().map(|(name, _)| name.clone()).collect()
}

/// Which of the launcher's kernels a tier runs in; 0 for all that are none. `None` for one that this launcher has not.
pub fn interpreter(hello: &Hello, tier: &Tier) -> Option<u8> {
    match tier {
        Tier::Native(_) => Some(0),
        Tier::Kernel(name) => {
            let at = hello.kernels.iter().position(|(known, _)| known == name)?;
            u8::try_from(at).ok()
        }
    }
}

/// The layer that runs Python on the code routes; `None` when nothing does.
pub fn python_backend(hello: &Hello, choice: CodeBackend) -> Option<&'static str> {
    let kernel = !kernels(hello).is_empty();
    match choice {
        CodeBackend::Auto | CodeBackend::Kernel if kernel => Some("kernel"),
        CodeBackend::Kernel => None,
        CodeBackend::Auto | CodeBackend::Native => hello.python.as_ref().map(|_| "native"),
    }
}

/// Whether a cell is the endpoint's while that answers.
pub fn may_be_remote(choice: CodeBackend, language: Language, runner: &Runner) -> bool {
    match runner {
        Runner::Kernel(_) => true,
        Runner::Chosen => language == Language::Python && choice == CodeBackend::Auto,
    }
}

/// The tier of a cell that the endpoint runs; `None` when it has no kernels.
pub fn remote_tier(available: &[String], runner: &Runner) -> Result<Option<Tier>, Refusal> {
    let wanted = match runner {
        Runner::Kernel(name) => name.as_ref(),
        Runner::Chosen => None,
    };
    match (wanted, available.first()) {
        (_, None) => Ok(None),
        (None, Some(default)) => Ok(Some(Tier::Kernel(default.clone()))),
        (Some(name), _) if available.contains(name) => Ok(Some(Tier::Kernel(name.clone()))),
        (Some(name), _) => Err(Refusal::UnknownKernel { name: name.clone(), available: available.to_vec() }),
    }
}

/// What keeps a cell's session. `looked_for` is the binary's name for the message when there is none.
pub fn tier(
    hello: &Hello,
    choice: CodeBackend,
    language: Language,
    runner: &Runner,
    looked_for: &str,
) -> Result<Tier, Refusal> {
    let wants_kernel = match runner {
        Runner::Kernel(_) => true,
        Runner::Chosen => {
            language == Language::Python
                && (choice == CodeBackend::Kernel || python_backend(hello, choice) == Some("kernel"))
        }
    };
    if wants_kernel {
        let name = match runner {
            Runner::Kernel(name) => name.as_deref(),
            Runner::Chosen => None,
        };
        return kernel(hello, name, looked_for).map(Tier::Kernel);
    }
    match runtime(hello, language) {
        Some(_) => Ok(Tier::Native(language)),
        None => Err(Refusal::NoInterpreter { language: language.name(), looked_for: looked_for.to_owned() }),
    }
}

fn kernel(hello: &Hello, name: Option<&str>, looked_for: &str) -> Result<String, Refusal> {
    let available = kernels(hello);
    let Some(default) = available.first() else {
        let why = match &hello.python {
            Some(python) => format!("ipykernel cannot be imported by {}", python.binary),
            None => format!("{looked_for} was not found"),
        };
        return Err(Refusal::NoKernel { why });
    };
    match name {
        None => Ok(default.clone()),
        Some(name) if available.iter().any(|known| known == name) => Ok(name.to_owned()),
        Some(name) => Err(Refusal::UnknownKernel { name: name.to_owned(), available }),
    }
}

/// The profile of a tier; a native Python's is the one whose preloaded modules fit the first cell.
pub fn profile(hello: &Hello, tier: &Tier, first_code: &str) -> Profile {
    match tier {
        Tier::Kernel(_) => Profile::Kernel,
        Tier::Native(Language::JavaScript) => Profile::Node,
        Tier::Native(Language::Python) => {
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

    fn chosen(hello: &Hello, choice: CodeBackend, language: Language) -> Result<Tier, Refusal> {
        tier(hello, choice, language, &Runner::Chosen, "python3")
    }

    #[test]
    fn the_first_cell_picks_the_profile_by_the_modules_it_names() {
        let mut hello = hello();
        let python = Tier::Native(Language::Python);
        assert_eq!(profile(&hello, &python, "print(1)"), Profile::Python);
        assert_eq!(profile(&hello, &python, "import pandas as pd"), Profile::PythonData);
        assert_eq!(profile(&hello, &Tier::Native(Language::JavaScript), "// numpy"), Profile::Node);
        assert_eq!(profile(&hello, &Tier::Kernel("python3".to_owned()), "1"), Profile::Kernel);
        hello.warm.clear();
        assert_eq!(profile(&hello, &python, "import pandas as pd"), Profile::Python);
    }

    #[test]
    fn a_language_without_interpreter_says_what_was_looked_for() {
        let hello = Hello { node: None, ..hello() };
        let refusal = tier(&hello, CodeBackend::Auto, Language::JavaScript, &Runner::Chosen, "node");
        let text = refusal.expect_err("no node").to_string();
        assert_eq!(text, "No interpreter for javascript: node was not found");
    }

    #[test]
    fn a_kernel_is_taken_where_there_is_one_and_only_for_python() {
        let mut hello = hello();
        let native = Ok(Tier::Native(Language::Python));
        assert_eq!(chosen(&hello, CodeBackend::Auto, Language::Python), native);
        assert!(matches!(
            chosen(&hello, CodeBackend::Kernel, Language::Python),
            Err(Refusal::NoKernel { .. })
        ));
        let python = hello.python.clone().expect("a Python");
        hello.kernels = vec![("python3".to_owned(), python.clone()), ("python3.12".to_owned(), python)];
        let kernel = Ok(Tier::Kernel("python3".to_owned()));
        assert_eq!(chosen(&hello, CodeBackend::Auto, Language::Python), kernel);
        assert_eq!(chosen(&hello, CodeBackend::Kernel, Language::Python), kernel);
        assert_eq!(chosen(&hello, CodeBackend::Native, Language::Python), native);
        let js = Ok(Tier::Native(Language::JavaScript));
        assert_eq!(chosen(&hello, CodeBackend::Kernel, Language::JavaScript), js);
        let named = |name: &str| {
            let runner = Runner::Kernel(Some(name.to_owned()));
            tier(&hello, CodeBackend::Native, Language::Python, &runner, "python3")
        };
        assert_eq!(named("python3"), kernel);
        assert_eq!(named("python3.12").map(|tier| interpreter(&hello, &tier)), Ok(Some(1)));
        let unknown = named("ir").expect_err("there is no R").to_string();
        assert_eq!(unknown, "unknown kernel 'ir'; available: python3, python3.12");
    }
}
