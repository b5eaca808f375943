//! Which runtimes there are and what they can import.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use axum::Extension;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{Refused, RefusedBody};
use crate::commands::Runtime as PackagesOf;
use crate::engine::TenantId;
use crate::languages::{Language, Runtime};
use crate::server::AppState;
use crate::server::answer;
use crate::server::fields::Fields;

/// What the product's own Python environment is made of.
const REQUIREMENTS: &str = include_str!("../../../deploy/python-requirements.txt");
/// Longest name of a runtime that an answer quotes, in characters.
const QUOTED_CHARS_MAX: usize = 40;

/// Runtimes that the public health answer calls by another name than [`libraries`] does.
const HEALTH_NAMES: [(&str, &str); 2] = [("typescript", "ts-node"), ("cpp", "c++")];

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(libraries))
}

/// What is known of a runtime without asking a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RuntimeFact {
    /// Programs it needs, by name.
    binaries: Vec<String>,
    /// Those that are not there.
    missing: Vec<String>,
    version: Option<String>,
}

impl RuntimeFact {
    /// Of one of the interpreters that the launcher's greeting tells of.
    fn greeted(language: &Language, version: Option<&str>) -> RuntimeFact {
        let binaries: Vec<String> = language.binaries().map(str::to_owned).collect();
        let missing = if version.is_some() { Vec::new() } else { binaries.clone() };
        let version = version.map(|version| version.trim_start_matches('v').to_owned());
        RuntimeFact { binaries, missing, version }
    }

    fn is_available(&self) -> bool {
        self.missing.is_empty()
    }
}

/// The runtimes by their key in an answer, as the table of languages has them: two the launcher's greeting knows of, the
/// rest was asked for in a sandbox.
fn runtimes(state: &AppState) -> BTreeMap<&str, RuntimeFact> {
    let hello = state.code().hello();
    let python = hello.as_deref().and_then(|hello| hello.python.as_ref()).map(|it| it.version.as_str());
    let node = hello.as_deref().and_then(|hello| hello.node.as_ref()).map(|it| it.version.as_str());
    let found = state.runs().and_then(|runs| runs.installed_now());
    let fact = |language: &Language| match &language.runtime {
        Runtime::Python => RuntimeFact::greeted(language, python),
        Runtime::JavaScript => RuntimeFact::greeted(language, node),
        Runtime::TypeScript | Runtime::Program(_) => {
            match found.as_ref().and_then(|found| found.of(language)) {
                None => RuntimeFact::greeted(language, None),
                Some(found) => RuntimeFact {
                    binaries: found.binaries.clone(),
                    missing: found.missing.clone(),
                    version: found.version.clone(),
                },
            }
        }
    };
    let all = state.languages().iter();
    all.filter_map(|language| Some((language.library_key.as_deref()?, fact(language)))).collect()
}

/// `runtime_capabilities` of the public health answer: no path, no package.
pub(in crate::server) fn capabilities(state: &AppState) -> Map<String, Value> {
    let row = |(key, fact): (&str, RuntimeFact)| {
        let renamed = HEALTH_NAMES.iter().find(|(known, _)| *known == key);
        let name = renamed.map_or(key, |(_, name)| name);
        let body =
            json!({ "available": fact.is_available(), "binaries": fact.binaries, "missing": fact.missing });
        (name.to_owned(), body)
    };
    runtimes(state).into_iter().map(row).collect()
}

/// `runtime_libraries` of the same: packages are for those with a key.
pub(in crate::server) fn versions(state: &AppState) -> Map<String, Value> {
    let row = |(key, fact): (&str, RuntimeFact)| {
        (key.to_owned(), json!({ "available": fact.is_available(), "version": fact.version }))
    };
    runtimes(state).into_iter().map(row).collect()
}

/// What each runtime can import.
#[derive(Debug, Serialize, ToSchema)]
struct LibrariesResponse {
    #[schema(value_type = Object)]
    runtime_libraries: Map<String, Value>,
}

/// A package, as far as it is declared to be there or was found there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
struct Package {
    name: String,
    version: Option<String>,
    declared: bool,
    installed: bool,
}

/// Libraries and tools of the runtimes.
#[utoipa::path(
    get, path = "/libraries", tag = "code interpreter",
    params(("runtime" = Option<String>, Query, description = "One runtime, by any of its names; without it all of them")),
    responses(
        (status = 200, body = LibrariesResponse),
        (status = 401, body = RefusedBody),
        (status = 404, body = RefusedBody, description = "No such runtime")
    )
)]
async fn libraries(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    uri: Uri,
) -> Response {
    let asked = Fields::of_query(uri.query(), &["runtime"]).text("runtime");
    // No name has a space: one is a plus of `c++` that was not escaped.
    let asked = asked.map(|name| name.replace(' ', "+"));
    let key_of = |name: &str| state.languages().resolve(name)?.library_key.as_deref();
    let wanted = asked.as_deref().and_then(key_of);
    if let (Some(name), None) = (&asked, wanted) {
        let name: String = name.chars().take(QUOTED_CHARS_MAX).collect();
        return Refused::new(StatusCode::NOT_FOUND, format!("runtime '{name}' not found")).into_response();
    }
    if let Some(runs) = state.runs() {
        // Asked once for each launcher; then it is known.
        runs.installed().await;
    }
    let mut runtime_libraries = Map::new();
    for (key, fact) in runtimes(&state) {
        if wanted.is_some_and(|wanted| wanted != key) {
            continue;
        }
        let packages = match key {
            "python" => python_packages(&state, &tenant, fact.is_available()).await,
            "node" if fact.is_available() => Ok(node_packages(&state, &tenant).await),
            _ => Ok(Vec::new()),
        };
        let packages = match packages {
            Ok(packages) => packages,
            Err(refused) => return refused.into_response(),
        };
        let section = json!({
            "available": fact.is_available(),
            "binaries": fact.binaries,
            "missing": fact.missing,
            "version": fact.version,
            "metadata": {
                "declared_count": packages.iter().filter(|package| package.declared).count(),
                "installed_count": packages.iter().filter(|package| package.installed).count(),
            },
            "packages": packages,
        });
        runtime_libraries.insert(key.to_owned(), section);
    }
    answer::json(StatusCode::OK, &LibrariesResponse { runtime_libraries })
}

async fn python_packages(
    state: &AppState,
    tenant: &TenantId,
    is_available: bool,
) -> Result<Vec<Package>, Refused> {
    if !is_available {
        return Ok(joined(declared(REQUIREMENTS), &[]));
    }
    let listed = state.commands().packages(tenant, PackagesOf::Python).await;
    let listed = listed
        .map_err(|_| Refused::new(StatusCode::SERVICE_UNAVAILABLE, "The packages cannot be listed now"))?;
    Ok(joined(declared(REQUIREMENTS), &listed_packages(&listed, "==")))
}

/// None when they cannot be listed now: the runtime itself is what clients ask about.
async fn node_packages(state: &AppState, tenant: &TenantId) -> Vec<Package> {
    let listed = state.commands().packages(tenant, PackagesOf::Node).await.unwrap_or_default();
    let package =
        |(name, version)| Package { name, version: Some(version), declared: false, installed: true };
    listed_packages(&listed, "@").into_iter().map(package).collect()
}

/// Names and pinned versions of a requirements file.
fn declared(requirements: &str) -> Vec<(String, String)> {
    let lines = requirements.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let pin = |line: &str| line.split_once("==").map(|(name, version)| (name.to_owned(), version.to_owned()));
    lines.filter_map(pin).collect()
}

/// `  - name<between>version` a line; other lines are for people.
fn listed_packages(text: &str, between: &str) -> Vec<(String, String)> {
    let package = |line: &str| {
        let (name, version) = line.trim_start().strip_prefix("- ")?.rsplit_once(between)?;
        Some((name.to_owned(), version.to_owned()))
    };
    text.lines().filter_map(package).collect()
}

/// What is declared, what is installed, and what is both, in order of names.
fn joined(declared: Vec<(String, String)>, installed: &[(String, String)]) -> Vec<Package> {
    let mut packages: BTreeMap<String, Package> = BTreeMap::new();
    for (name, version) in installed {
        let version = Some(version.clone());
        let package = Package { name: name.clone(), version, declared: false, installed: true };
        packages.insert(canonical(name), package);
    }
    for (name, version) in declared {
        let absent = Package { name: name.clone(), version: Some(version), declared: true, installed: false };
        packages.entry(canonical(&name)).or_insert(absent).declared = true;
    }
    packages.into_values().collect()
}

/// Runs of `-`, `_` and `.` are one `-`, and case does not count (PEP 503).
fn canonical(name: &str) -> String {
    let parts: Vec<&str> = name.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    parts.join("-").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declared_and_installed_packages_meet_under_one_name() {
        let declared = declared("# a comment\nnumpy==2.4.6\nmatplotlib-inline==0.2.2  # why\nabsent==1\n");
        let listed = "Python 3.12, 3 packages\n  - numpy==2.4.6\n  - Matplotlib_Inline==0.2.2\n  - pip==24\n";
        let packages = joined(declared, &listed_packages(listed, "=="));
        let rows: Vec<_> = packages
            .iter()
            .map(|it| (it.name.as_str(), it.version.as_deref().unwrap(), it.declared, it.installed))
            .collect();
        assert_eq!(
            rows,
            [
                ("absent", "1", true, false),
                ("Matplotlib_Inline", "0.2.2", true, true),
                ("numpy", "2.4.6", true, true),
                ("pip", "24", false, true),
            ]
        );
        let scoped = listed_packages("Node.js v20, 1 packages\n  - @types/node@20.1.0\n", "@");
        assert_eq!(scoped, [("@types/node".to_owned(), "20.1.0".to_owned())]);
    }

    #[test]
    fn the_products_own_list_is_read() {
        let declared = declared(REQUIREMENTS);
        for name in ["numpy", "pandas", "matplotlib", "ipykernel"] {
            assert!(declared.iter().any(|(known, version)| known == name && !version.is_empty()), "{name}");
        }
    }
}
