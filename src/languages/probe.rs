//! Which languages a sandbox has: one small script, run inside it, looks for all of them.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt::Write as _;

use super::{Language, Languages};

/// How long a program may take to print its version.
const VERSION_SECONDS_MAX: u32 = 10;
/// Of what it prints, so many bytes are looked at.
const VERSION_BYTES_MAX: u32 = 300;
/// What was found of one language.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    pub available: bool,
    /// Names of the programs that it needs.
    pub binaries: Vec<String>,
    /// Those of them, and files besides, that are not there.
    pub missing: Vec<String>,
    pub version: Option<String>,
}

/// What was found of all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Availability(HashMap<String, Found>);

impl Availability {
    pub fn of(&self, language: &Language) -> Option<&Found> {
        self.0.get(&language.id)
    }

    pub fn has(&self, language: &Language) -> bool {
        self.of(language).is_some_and(|found| found.available)
    }

    /// Such as `12.2.0`.
    pub fn version(&self, language: &Language) -> Option<&str> {
        self.of(language)?.version.as_deref()
    }
}

impl Languages {
    /// A command that looks for every language inside a sandbox.
    pub fn question(&self) -> Vec<String> {
        ["sh", "-c", &self.script(), "probe"].map(str::to_owned).to_vec()
    }

    /// Prints `=N` for each language, then `-` and the name of each thing that is missing, then `:` and the lines of its
    /// version.
    fn script(&self) -> String {
        let mut script = String::new();
        for (nth, language) in self.iter().enumerate() {
            let detect = &language.detect;
            let mut line = |text: &str| writeln!(script, "{text}").expect("writing to a String cannot fail");
            line(&format!("echo ={nth}; ok=1"));
            let tests = detect.binaries.iter().map(|name| (name, "command -v"));
            for (name, test) in tests.chain(detect.files.iter().map(|name| (name, "test -e"))) {
                let name = quoted(name);
                line(&format!("{test} {name} >/dev/null 2>&1 || {{ echo -{name}; ok=; }}"));
            }
            if !detect.version.is_empty() {
                let words: Vec<_> = detect.version.iter().map(|word| quoted(word)).collect();
                let words = words.join(" ");
                line(&format!(
                    "[ -z \"$ok\" ] || timeout {VERSION_SECONDS_MAX} {words} 2>&1 </dev/null | \
                     head -c {VERSION_BYTES_MAX} | sed 's/^/:/'; echo"
                ));
            }
        }
        script
    }

    /// What that command said.
    pub fn understand(&self, text: &str) -> Availability {
        let needs = |language: &Language| language.binaries().map(str::to_owned).collect();
        let mut all: Vec<Found> =
            self.iter().map(|it| Found { binaries: needs(it), ..Found::default() }).collect();
        let mut asked = vec![false; all.len()];
        let mut current = None;
        for line in text.lines() {
            if let Some(nth) = line.strip_prefix('=').and_then(|nth| nth.parse::<usize>().ok()) {
                current = (nth < all.len()).then_some(nth);
                if let Some(asked) = asked.get_mut(nth) {
                    *asked = true;
                }
                continue;
            }
            let Some(found) = current.and_then(|nth| all.get_mut(nth)) else { continue };
            match line.split_at_checked(1) {
                Some(("-", name)) => found.missing.push(base_name(name).to_owned()),
                Some((":", said)) if found.version.is_none() => found.version = version_in(said),
                _ => {}
            }
        }
        let ids = self.iter().map(|language| language.id.clone());
        let found = all
            .into_iter()
            .zip(asked)
            .map(|(found, asked)| Found { available: asked && found.missing.is_empty(), ..found });
        Availability(ids.zip(found).collect())
    }
}

/// One word of a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Answers name no paths.
pub(super) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The first number with a dot in it, else the first number.
fn version_in(text: &str) -> Option<String> {
    let numbers = || {
        let runs = text.split(|c: char| !(c.is_ascii_digit() || c == '.'));
        runs.map(|run| run.trim_matches('.')).filter(|run| !run.is_empty())
    };
    numbers().find(|number| number.contains('.')).or_else(|| numbers().next()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::languages::tests::languages;

    #[test]
    fn the_version_is_taken_from_what_compilers_print() {
        for (text, version) in [
            ("Python 3.11.7", "3.11.7"),
            ("GNU bash, version 5.2.15(1)-release (x86_64-pc-linux-gnu)", "5.2.15"),
            ("v20.20.2", "20.20.2"),
            ("go version go1.27.3 linux/amd64", "1.27.3"),
            ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "12.2.0"),
            ("openjdk 17.0.19 2026-04-21", "17.0.19"),
            ("openjdk 21 2023-09-19", "21"),
            ("ruby 3.1.2p20 (2022-04-12 revision 4491bb740a)", "3.1.2"),
            ("Lua 5.4.4  Copyright (C) 1994-2022 Lua.org, PUC-Rio", "5.4.4"),
            ("Rscript (R) version 4.2.2 (2022-10-31)", "4.2.2"),
        ] {
            assert_eq!(version_in(text).as_deref(), Some(version), "{text}");
        }
        assert_eq!(version_in("no number. at all..."), None);
    }

    #[test]
    fn an_answer_is_told_apart_by_language() {
        let languages = languages();
        let answer = "=0\n:Python 3.12.1\n\n=1\n-bash\n\n=3\n-/opt/caisson/toolchains/typescript/sucrase.js\n=99\n-x\n";
        let found = languages.understand(answer);
        let of = |lang: &str| found.of(languages.resolve(lang).expect("in the table")).expect("asked for");
        assert_eq!(
            *of("py"),
            Found {
                available: true,
                binaries: vec!["python3".to_owned()],
                missing: Vec::new(),
                version: Some("3.12.1".to_owned())
            }
        );
        assert!(!of("bash").available && of("bash").missing == ["bash"]);
        assert!(!of("js").available, "nothing was said of it");
        assert_eq!(
            (of("ts").binaries.as_slice(), of("ts").missing.as_slice()),
            (&["node".to_owned()][..], &["sucrase.js".to_owned()][..])
        );
    }

    #[test]
    fn a_shell_answers_the_question() {
        let languages = languages();
        let words = languages.question();
        let output = Command::new(&words[0]).args(&words[1..]).output().expect("a shell is on every host");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        let found = languages.understand(&String::from_utf8_lossy(&output.stdout));
        let bash = languages.resolve("bash").expect("in the table");
        assert!(found.has(bash), "{found:?}");
        assert!(found.version(bash).is_some_and(|version| version.contains('.')), "{found:?}");
        let typescript = languages.resolve("ts").expect("in the table");
        assert!(!found.has(typescript), "the host has no folder of ours");
    }
}
