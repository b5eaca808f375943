//! What a sandbox is asked about itself: its shells, and which packages its interpreters can import.
//!
//! The answers are the same for all sandboxes of a launcher, so each question is asked once, in a sandbox of the caller's
//! space. Nothing of that space may change the answer, which other tenants see too: the interpreters run isolated from
//! it, and no shell reads its files.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::{Birth, Commands, QUIET_DEFAULT, Refused, Run, Session, Settled, Wanted};
use crate::engine::{Stream, TenantId};
use crate::inside::commands::frame::Found;
use crate::launcher::plan::Account;
use crate::launcher::posture::Hello;
use crate::session::id::SessionId;

/// How long a question may take.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Longest answer.
const ANSWER_BYTES_MAX: usize = 1024 * 1024;
/// An account's home does not matter, but what an interpreter looks for below the working directory must not be a tenant's.
const NEUTRAL_DIR: &str = "/";

/// Isolated: neither the environment nor the user's own packages count.
const PYTHON: &str = r#"
import importlib.metadata, re
found = {}
for it in importlib.metadata.distributions():
    name = it.metadata["Name"]
    if name:
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), (name, it.version))
for _, (name, version) in sorted(found.items()):
    print(f"  - {name}=={version}")
"#;
/// Folders that belong to Node itself; those below a home are its owner's.
const NODE: &str = r#"
const fs = require("fs"), path = require("path"), os = require("os");
const home = os.homedir();
const folders = [path.join(path.dirname(process.execPath), "..", "lib", "node_modules"), "/usr/share/nodejs", ...module.constructor.globalPaths];
const found = new Map();
const look = (folder, scope) => {
  let names = [];
  try { names = fs.readdirSync(folder); } catch { return; }
  for (const name of names) {
    if (!scope && name.startsWith("@")) { look(path.join(folder, name), name); continue; }
    try {
      const it = JSON.parse(fs.readFileSync(path.join(folder, name, "package.json"), "utf8"));
      if (it.name && it.version && !found.has(it.name)) found.set(it.name, it.version);
    } catch {}
  }
};
for (const folder of new Set(folders)) if (!folder.startsWith(home + "/")) look(folder, "");
console.log(`Node.js ${process.version}, ${found.size} packages`);
for (const name of [...found.keys()].sort()) console.log(`  - ${name}@${found.get(name)}`);
"#;

/// Whose packages.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Runtime {
    Python,
    Node,
}

/// The answers, and the launcher they are about.
#[derive(Default)]
pub(super) struct Facts(tokio::sync::Mutex<Known>);

#[derive(Default)]
struct Known {
    of: Option<Arc<Hello>>,
    found: Option<Found>,
    python: Option<String>,
    node: Option<String>,
}

impl Known {
    /// Answers about an earlier launcher are forgotten.
    fn keep_about(&mut self, hello: &Arc<Hello>) {
        if !self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, hello)) {
            *self = Known { of: Some(Arc::clone(hello)), ..Known::default() };
        }
    }
}

impl Commands {
    /// What there is for commands. `None` while it cannot be found out.
    pub async fn found(&self, tenant: &TenantId) -> Option<Found> {
        let settled = self.settle_for_facts(tenant).await.ok()?;
        let mut known = self.facts.0.lock().await;
        known.keep_about(&settled.hello);
        if known.found.is_none() {
            let session = self.nameless(tenant, &settled);
            let agent = session.agent(&*self.launcher, self.config.memory_mib_max).await.ok()?;
            let mut found = agent.found.clone();
            found.bash = self.config.bash.clone().or(found.bash);
            known.found = Some(found);
        }
        known.found.clone()
    }

    /// The packages that an interpreter of the sandbox can import, one a line.
    pub async fn packages(&self, tenant: &TenantId, runtime: Runtime) -> Result<String, Refused> {
        let settled = self.settle_for_facts(tenant).await?;
        let mut known = self.facts.0.lock().await;
        known.keep_about(&settled.hello);
        let (answer, looked_for) = match runtime {
            Runtime::Python => (&known.python, settled.hello.python.as_ref()),
            Runtime::Node => (&known.node, settled.hello.node.as_ref()),
        };
        if let Some(answer) = answer {
            return Ok(answer.clone());
        }
        let binary = looked_for.map(|runtime| runtime.binary.clone());
        let words = match runtime {
            Runtime::Python => {
                vec![binary.ok_or(Refused::NoInterpreter("python"))?, "-I".into(), "-c".into(), PYTHON.into()]
            }
            Runtime::Node => vec![binary.ok_or(Refused::NoInterpreter("node"))?, "-e".into(), NODE.into()],
        };
        let answer = self.ask(&self.nameless(tenant, &settled), words).await?;
        match runtime {
            Runtime::Python => known.python = Some(answer.clone()),
            Runtime::Node => known.node = Some(answer.clone()),
        }
        Ok(answer)
    }

    /// As the sandbox's own account, whatever the configured default is.
    async fn settle_for_facts(&self, tenant: &TenantId) -> Result<Settled, Refused> {
        let settled = self.settle(tenant, None).await?;
        Ok(Settled { account: Account(0), ..settled })
    }

    /// A session that nobody can name.
    fn nameless(&self, tenant: &TenantId, settled: &Settled) -> Arc<Session> {
        let birth = Birth {
            quiet_max: QUIET_DEFAULT,
            ..self.birth(tenant, &SessionId::generate(), settled, None, Vec::new())
        };
        Arc::new(Session::new(birth))
    }

    async fn ask(&self, session: &Arc<Session>, words: Vec<String>) -> Result<String, Refused> {
        let run = Run {
            wanted: Wanted::Words(words),
            session: None,
            cwd: Some(NEUTRAL_DIR.to_owned()),
            keeps_cwd: false,
            env: Vec::new(),
            user: None,
            hard_timeout: Some(ANSWER_MAX),
            stdin_ends: true,
        };
        let running = self.run_in(session, run).await?;
        let outlook = running.command.ended().await;
        let read = running.command.read(0, 0, ANSWER_BYTES_MAX);
        if outlook.exit_code == Some(0) && running.command.produced(Stream::Stdout) > 0 {
            return Ok(read.stdout.text());
        }
        tracing::error!(exit_code = ?outlook.exit_code, said = read.stderr.text(), "packages could not be listed");
        Err(Refused::LaunchFailed)
    }
}
