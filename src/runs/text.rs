//! What becomes of a program's text before it is an answer.
#![forbid(unsafe_code)]

use regex::Regex;
use std::sync::LazyLock;

/// Escape sequences of terminals: control sequences, operating system commands, and the short ones.
static ANSI: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
        .expect("it is a constant")
});

/// Without the escape sequences.
pub(super) fn plain(text: String) -> String {
    if text.contains('\u{1b}') { ANSI.replace_all(&text, "").into_owned() } else { text }
}

/// Ends with this line.
pub(super) fn with_line(text: &mut String, line: &str) {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(line);
    text.push('\n');
}

/// At most so many bytes, at the end of a character. True when something was cut.
pub(super) fn cut(text: &mut String, bytes_max: usize) -> bool {
    if text.len() <= bytes_max {
        return false;
    }
    let mut end = bytes_max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    true
}

/// With the strict prelude in front, behind a `#!` line if there is one.
pub(super) fn strict_bash(code: &str) -> String {
    const PRELUDE: &str = "set -euo pipefail\n";
    match code.strip_prefix("#!").and_then(|_| code.split_once('\n')) {
        Some((first, rest)) => format!("{first}\n{PRELUDE}{rest}"),
        None if code.starts_with("#!") => format!("{code}\n{PRELUDE}"),
        None => format!("{PRELUDE}{code}"),
    }
}

/// Behind a missing module, how it would be installed.
pub(super) fn with_hint(stderr: &mut String) {
    static MISSING: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"ModuleNotFoundError: No module named '([A-Za-z0-9_.]+)'").expect("it is a constant")
    });
    let Some(module) = MISSING.captures_iter(stderr).last().map(|found| found[1].to_owned()) else { return };
    let package = module.split('.').next().unwrap_or(&module);
    with_line(
        stderr,
        &format!(
            "Hint: install the missing package with `python -m pip install {package}`, or from code with \
             `import subprocess, sys; subprocess.check_call([sys.executable, \"-m\", \"pip\", \"install\", \
             \"{package}\"])`; without network in this sandbox neither can fetch it."
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_go_and_nothing_else_does() {
        assert_eq!(plain("\u{1b}[31mred\u{1b}[0m [31m é".to_owned()), "red [31m é");
        assert_eq!(plain("\u{1b}]0;title\u{7}x\u{1b}(y".to_owned()), "x\u{1b}(y");
    }

    #[test]
    fn the_prelude_goes_behind_the_first_line_that_names_an_interpreter() {
        assert_eq!(strict_bash("echo"), "set -euo pipefail\necho");
        assert_eq!(strict_bash("#!/bin/bash\necho"), "#!/bin/bash\nset -euo pipefail\necho");
        assert_eq!(strict_bash("# no\necho"), "set -euo pipefail\n# no\necho");
    }

    #[test]
    fn a_missing_module_is_followed_by_both_ways_to_install_it() {
        let mut stderr = "Traceback\nModuleNotFoundError: No module named 'a.b'".to_owned();
        with_hint(&mut stderr);
        assert!(
            stderr.contains("python -m pip install a`")
                && stderr.contains("subprocess.check_call([sys.executable")
        );
        let mut other = "KeyError: 'x'\n".to_owned();
        with_hint(&mut other);
        assert_eq!(other, "KeyError: 'x'\n");
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let mut text = "aé".to_owned();
        assert!(cut(&mut text, 2));
        assert_eq!(text, "a");
        assert!(!cut(&mut text, 1));
    }
}
