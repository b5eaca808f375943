//! The house rules of `docs/architecture.md` that a machine can check: which way modules lean, where unsafe code and
//! system calls live, that every policy entry has a reason, and that the README's commands exist.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Who may lean on whom. A row is the longest prefix of a module's path; what stands right of it are prefixes that
/// its `crate::` and `super::` paths may begin with. A module may always use itself and what lies below it.
///
/// The useful facts are the absences: no family knows another, nor a backend, the launcher or a system call;
/// the launcher knows nothing of HTTP, sessions or languages; `policy`, `launcher::plan` and
/// `launcher::posture` are data.
const LEANINGS: &[(&str, &[&str])] = &[
    ("sys", &[]),
    ("launcher::plan", &[]),
    ("launcher::posture", &["launcher::plan"]),
    ("launcher::client", &["launcher::plan", "launcher::posture", "sys"]),
    ("launcher", &["launcher", "policy", "sys"]),
    ("policy", &["launcher::plan"]),
    ("harness", &["engine", "launcher::client", "launcher::plan"]),
    // Inside a sandbox: nothing of the daemon's or the launcher's.
    ("inside", &["sys"]),
    ("inside::files", &["files::names", "files::wire", "sys"]),
    ("files::names", &[]),
    ("files::wire", &["files::names"]),
    (
        "files",
        &["engine", "launcher::client", "launcher::plan", "launcher::posture", "sys", "tenant", "zygote"],
    ),
    ("telemetry", &["config::LogFormat"]),
    (
        "commands",
        &[
            "engine",
            "harness",
            "inside::commands::frame",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "session::HOME_DIR",
            "session::epoch_ms",
            "session::id",
            "store",
            "tenant",
            "zygote",
        ],
    ),
    ("config", &["engine", "launcher::plan", "launcher::posture", "policy", "telemetry"]),
    ("objects", &["engine", "launcher::plan", "store"]),
    ("languages", &["policy"]),
    ("workspace", &["launcher::client", "launcher::plan", "sys", "zygote"]),
    (
        "runs",
        &[
            "backend::select",
            "config",
            "engine",
            "harness",
            "inside::commands::frame",
            "languages",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "objects",
            "session::epoch_ms",
            "store",
            "tenant",
            "workspace",
            "zygote",
        ],
    ),
    ("cli", &["config", "engine", "launcher::posture"]),
    ("doctor", &["config", "launcher::client", "launcher::plan", "launcher::posture", "policy"]),
    ("supervisor", &["cli", "config", "launcher", "policy", "server", "sys", "telemetry"]),
    (
        "daemon",
        &[
            "commands",
            "config",
            "engine",
            "files",
            "languages",
            "launcher::client",
            "objects",
            "policy",
            "runs",
            "server",
            "store",
            "sys",
            "tenant",
        ],
    ),
    ("run", &["config", "engine", "launcher", "store", "supervisor", "sys"]),
    // The rows of its tables are types of those who keep them there.
    (
        "store",
        &[
            "config",
            "engine",
            "launcher::plan",
            "session::SessionKey",
            "session::epoch_ms",
            "session::id",
            "sys",
            "telemetry",
            "tenant::audit",
        ],
    ),
    ("tenant", &["config", "engine", "harness::interpreter", "launcher::plan", "store", "telemetry"]),
    ("space", &["config", "engine", "harness", "launcher::client", "launcher::plan", "store", "tenant"]),
    (
        "zygote",
        &[
            "config",
            "engine",
            "harness",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "telemetry",
        ],
    ),
    (
        "backend",
        &[
            "config",
            "engine",
            "harness",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "space",
            "store",
            "telemetry",
            "tenant",
            "zygote",
        ],
    ),
    (
        "session",
        &[
            "backend",
            "config",
            "engine",
            "harness",
            "launcher::plan",
            "space",
            "store",
            "telemetry",
            "tenant",
            "zygote",
        ],
    ),
    (
        "engine",
        &[
            "backend",
            "config",
            "harness",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "session",
            "space",
            "store",
            "telemetry",
            "tenant",
            "zygote",
        ],
    ),
    // The families first: their rows are longer than the one of `server` and win over it.
    ("server::aio", FAMILY),
    ("server::librechat", FAMILY),
    ("server::mcp", FAMILY),
    (
        "server",
        &[
            "server",
            "backend",
            "commands",
            "config",
            "engine",
            "files",
            "languages",
            "launcher::client",
            "launcher::plan",
            "launcher::posture",
            "objects",
            "runs",
            "session",
            "space",
            "store",
            "sys",
            "telemetry",
            "tenant",
        ],
    ),
];

/// What any family may use: the engine, and what the server offers to all of them; never another of `FAMILIES`.
const FAMILY: &[&str] = &[
    "server",
    "commands",
    "config",
    "engine",
    "files",
    "languages",
    "objects",
    "runs",
    "session::id",
    "telemetry",
    "tenant",
];
const FAMILIES: &[&str] = &["server::aio", "server::librechat", "server::mcp"];

#[test]
fn modules_lean_the_way_they_should() {
    let mut wrong = Vec::new();
    for file in sources() {
        let Some(module) = module_of(&file) else { continue };
        let Some((row, allowed)) = LEANINGS
            .iter()
            .filter(|(prefix, _)| within(&module, prefix))
            .max_by_key(|(prefix, _)| prefix.len())
        else {
            wrong.push(format!("{}: module `{module}` has no row in LEANINGS", file.display()));
            continue;
        };
        for path in paths_of(&code_of(&file), &module) {
            // A bare item of the crate's root or of the parent (a type, a macro) leans on no module of its own.
            let itself = within(&path, row) || within(&path, &module);
            // Parents hold the types that their directory is named after.
            let of_parent =
                within(&module, path.rsplit_once("::").map_or("", |(parent, _)| parent)) && !is_module(&path);
            let of_other_family = FAMILIES.contains(row)
                && FAMILIES.iter().any(|family| family != row && within(&path, family));
            let may = itself || of_parent || allowed.iter().any(|prefix| within(&path, prefix));
            if !may || of_other_family {
                wrong.push(format!("{}: `{row}` must not lean on `{path}`", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn only_sys_and_launcher_may_hold_unsafe_code() {
    let wrong: Vec<_> = sources()
        .into_iter()
        .filter(|file| {
            module_of(file).is_some_and(|module| !within(&module, "sys") && !within(&module, "launcher"))
        })
        .filter(|file| !code_of(file).contains("#![forbid(unsafe_code)]"))
        .collect();
    assert!(wrong.is_empty(), "these do not open with #![forbid(unsafe_code)]: {wrong:#?}");
}

#[test]
fn only_sys_and_launcher_name_libc() {
    let wrong: Vec<_> = sources()
        .into_iter()
        .filter(|file| {
            module_of(file).is_none_or(|module| !within(&module, "sys") && !within(&module, "launcher"))
        })
        .filter(|file| names(&code_of(file), "libc"))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn only_server_knows_http() {
    let wrong: Vec<_> = sources()
        .into_iter()
        .filter(|file| {
            // The endpoint backend is a client of somebody else's server.
            module_of(file)
                .is_none_or(|module| !within(&module, "server") && !within(&module, "backend::endpoint"))
        })
        .filter(|file| {
            ["axum", "hyper", "tower_http", "utoipa_axum"].iter().any(|name| names(&code_of(file), name))
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn nothing_is_left_open_in_the_source() {
    let mut wrong = Vec::new();
    for file in files(&root().join("src"), "rs").into_iter().chain(files(&root().join("harness"), "py")) {
        for (number, line) in read(&file).lines().enumerate() {
            let mut words = line.split(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '!')));
            if words.any(|word| matches!(word, "TODO" | "FIXME" | "XXX" | "todo!" | "unimplemented!")) {
                wrong.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// What `cargo test` passes over is run by a stage of `make test`, which gives it what it needs.
#[test]
fn ignored_tests_name_the_stage_that_runs_them() {
    let script = read(&root().join("scripts/test.sh"));
    let (mut found, mut wrong) = (0, Vec::new());
    for file in files(&root().join("src"), "rs").into_iter().chain(files(&root().join("tests"), "rs")) {
        for (number, line) in read(&file).lines().enumerate() {
            let Some(rest) = line.trim().strip_prefix("#[ignore") else { continue };
            found += 1;
            let stage = rest.strip_suffix("\"]").and_then(|rest| rest.rsplit_once("run by the stage "));
            let is_run = |stage: &str| script.contains(&format!("    {stage}) stage {stage} "));
            if !stage.is_some_and(|(_, stage)| is_run(stage)) {
                wrong.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(found > 0, "control: there are some");
}

/// An entry is a table without tables in it: it says what it allows or limits, and why.
#[test]
fn every_policy_entry_has_a_reason() {
    fn walk(at: &str, table: &toml::Table, wrong: &mut Vec<String>) {
        let mut leaf = true;
        for (key, value) in table {
            let below: Vec<&toml::Table> = match value {
                toml::Value::Table(table) => vec![table],
                toml::Value::Array(items) => items.iter().filter_map(toml::Value::as_table).collect(),
                _ => continue,
            };
            for (index, inner) in below.iter().enumerate() {
                leaf = false;
                walk(&format!("{at} {key}[{index}]"), inner, wrong);
            }
        }
        let why = table.get("why").and_then(toml::Value::as_str).unwrap_or_default();
        if leaf && why.trim().is_empty() {
            wrong.push(at.to_owned());
        }
    }
    let mut wrong = Vec::new();
    for file in files(&root().join("policies"), "toml") {
        let name = file.display().to_string();
        match read(&file).parse::<toml::Table>() {
            Ok(table) => walk(&name, &table, &mut wrong),
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "entries without a `why`:\n{}", wrong.join("\n"));
}

#[test]
fn commands_of_the_readme_exist() {
    let makefile = read(&root().join("Makefile"));
    let targets: Vec<&str> =
        makefile.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect();
    let readme = read(&root().join("README.md"));
    // In code only: the word "make" has other uses in prose.
    let mut named: Vec<&str> = readme
        .split(['`', '\n'])
        .filter_map(|part| part.trim_start_matches(['$', ' ']).strip_prefix("make "))
        .filter_map(|rest| rest.split_whitespace().next())
        .collect();
    named.sort_unstable();
    named.dedup();
    assert!(named.contains(&"serve") && named.contains(&"test"), "the README names {named:?}");
    let missing: Vec<_> = named.into_iter().filter(|target| !targets.contains(target)).collect();
    assert!(missing.is_empty(), "the README names targets that the Makefile lacks: {missing:?}");
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let mut wrong = Vec::new();
    for file in files(&root().join("docs"), "md").into_iter().chain([root().join("README.md")]) {
        let text = read(&file);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            let outside = target.is_empty() || target.contains("://");
            if !outside && !file.parent().is_some_and(|folder| folder.join(target).exists()) {
                wrong.push(format!("{}: {target}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn python_pins_are_exact() {
    for list in [
        "deploy/python-requirements.txt",
        "tests/endpoint-requirements.txt",
        "tests/mcp-requirements.txt",
        "tests/suites-requirements.txt",
    ] {
        for line in read(&root().join(list)).lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            let exact = line
                .split_once("==")
                .is_some_and(|(name, version)| !name.is_empty() && !version.contains(['*', ' ']));
            assert!(exact, "{list}: {line}");
        }
    }
}

// --- reading the source --------------------------------------------------------------------------------------------

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below `folder` with that extension, sorted; none when the folder is missing.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// What ships: modules that are there for tests only may lean where they like.
fn sources() -> Vec<PathBuf> {
    let all = files(&root().join("src"), "rs").into_iter();
    all.filter(|file| !module_of(file).is_some_and(|module| is_for_tests(&module))).collect()
}

/// `src/server/aio/v1.rs` → `server::aio::v1`; nothing for `main.rs` and `lib.rs`, which may name everything.
fn module_of(file: &Path) -> Option<String> {
    let relative = file.strip_prefix(root().join("src")).expect("a file of src");
    let mut parts: Vec<_> =
        relative.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    let module = parts.join("::");
    (!matches!(module.as_str(), "main" | "lib" | "")).then_some(module)
}

fn is_module(path: &str) -> bool {
    let file = root().join("src").join(path.replace("::", "/"));
    file.with_extension("rs").exists() || file.join("mod.rs").exists()
}

/// The text without comments and without an inline `mod tests` at its end, which may lean where it likes.
fn code_of(file: &Path) -> String {
    let text = read(file);
    let inline_tests = text
        .match_indices("#[cfg(test)]\nmod ")
        .map(|(at, _)| at)
        .find(|&at| text[at..].lines().nth(1).is_some_and(|line| line.trim_end().ends_with('{')));
    let text = &text[..inline_tests.unwrap_or(text.len())];
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Whether the module, or one above it, is declared under `#[cfg(test)]`.
fn is_for_tests(module: &str) -> bool {
    let (parent, name) = module.rsplit_once("::").unwrap_or(("", module));
    let folder = root().join("src").join(parent.replace("::", "/"));
    let declared_in = match parent {
        "" => folder.join("lib.rs"),
        _ if folder.join("mod.rs").exists() => folder.join("mod.rs"),
        _ => folder.with_extension("rs"),
    };
    let text = fs::read_to_string(declared_in).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let here =
        lines.windows(2).any(|pair| pair[0] == "#[cfg(test)]" && pair[1].ends_with(&format!("mod {name};")));
    here || (!parent.is_empty() && is_for_tests(parent))
}

/// Whether `path` is `prefix` or lies below it.
fn within(path: &str, prefix: &str) -> bool {
    path == prefix || path.strip_prefix(prefix).is_some_and(|rest| rest.starts_with("::"))
}

/// Whether the code names a crate: the word, followed by `::` or in a `use`.
fn names(code: &str, krate: &str) -> bool {
    code.match_indices(krate).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let after = &code[at + krate.len()..];
        let word = !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '"' | '-'));
        word && (after.starts_with("::") || (after.starts_with(';') && code[..at].ends_with("use ")))
    })
}

/// Every path that begins with `crate::` or `super::`, from the crate's root, with `{…}` spelt out.
fn paths_of(code: &str, module: &str) -> Vec<String> {
    let mut found = BTreeMap::new();
    for keyword in ["crate::", "super::"] {
        for (at, _) in code.match_indices(keyword) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | ':')) {
                continue; // Part of another word, or the second `super` of `super::super`.
            }
            let mut rest = &code[at..];
            let mut base: Vec<&str> = module.split("::").collect();
            if let Some(after) = rest.strip_prefix("crate::") {
                (rest, base) = (after, Vec::new());
            }
            while let Some(after) = rest.strip_prefix("super::") {
                rest = after;
                base.pop();
            }
            expand(&base.join("::"), rest, &mut found);
        }
    }
    found.into_keys().collect()
}

/// Adds what a use tree names: `a::{b, c::{d, e}}` → `a::b`, `a::c::d`, `a::c::e`. Returns what follows the tree.
fn expand<'a>(base: &str, text: &'a str, found: &mut BTreeMap<String, ()>) -> &'a str {
    let text = text.trim_start();
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let path = match (base, name) {
        (_, "" | "self") => base.to_owned(),
        ("", _) => name.to_owned(),
        _ => format!("{base}::{name}"),
    };
    if let Some(mut inner) =
        rest.strip_prefix("::{").or_else(|| if name.is_empty() { rest.strip_prefix('{') } else { None })
    {
        loop {
            inner = expand(&path, inner, found).trim_start();
            match inner.strip_prefix(',') {
                Some(after) if !after.trim_start().starts_with('}') => inner = after,
                Some(after) => return after.trim_start().trim_start_matches('}'),
                None => return inner.strip_prefix('}').unwrap_or(inner),
            }
        }
    }
    if let Some(below) = rest.strip_prefix("::")
        && below.starts_with(|c: char| c.is_alphabetic() || c == '_' || c == '{')
    {
        return expand(&path, below, found);
    }
    // `name as other` in a tree.
    let rest = rest.trim_start().strip_prefix("as ").map_or(rest, |renamed| {
        renamed.trim_start().trim_start_matches(|c: char| c.is_alphanumeric() || c == '_')
    });
    if !path.is_empty() {
        found.insert(path, ());
    }
    rest
}

#[test]
fn use_trees_are_read_right() {
    let code = "use crate::engine::{self, execution::{Output, Status as S}, Language};\nuse super::wire;\nlet x = crate::sys::cvt(0);\npub(crate) fn f() {}\nuse super::super::auth::Key;";
    assert_eq!(
        paths_of(code, "server::aio::v1"),
        [
            "engine",
            "engine::Language",
            "engine::execution::Output",
            "engine::execution::Status",
            "server::aio::wire",
            "server::auth::Key",
            "sys::cvt",
        ]
    );
}
