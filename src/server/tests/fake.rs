//! An engine that answers by the code it is given and remembers what it was asked.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Map, json};

use crate::engine::run::NewSession;
use crate::engine::{
    Backends, CellRequest, ErrorOutput, Execution, KernelInfo, Language, Output, Piece, Refusal, Runner,
    SessionChoice, Status, Stream, TenantId, Tier, Tiers,
};
use crate::launcher::plan::Profile;
use crate::launcher::posture::{Hello, LayerReport, Posture, PostureReport, RuntimeReport};
use crate::server::code::*;

#[derive(Clone, Default)]
pub(super) struct Fake {
    pub(super) asked: Arc<Mutex<Vec<CellRequest>>>,
    pub(super) sessions: Arc<Mutex<BTreeMap<(String, String), SessionEntry>>>,
    dropped: Arc<AtomicBool>,
    /// Other than the usual ones.
    told: Option<(Backends, CodeInfo)>,
}

/// Notes when the engine's future is gone.
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn pieces() -> Vec<Piece> {
    let bundle = |text: &str| Map::from_iter([("text/plain".to_owned(), json!(text))]);
    let shown = Output::DisplayData { data: bundle("a"), metadata: Map::new() };
    vec![
        Piece::Output {
            output: Output::Stream { name: Stream::Stdout, text: "1\n".to_owned() },
            display_id: None,
        },
        Piece::Output { output: shown, display_id: Some("d".to_owned()) },
        Piece::Update { display_id: "d".to_owned(), data: bundle("b"), metadata: Map::new() },
        Piece::Clear { wait: true },
    ]
}

impl Fake {
    /// One that says this of what runs what.
    pub(super) fn telling(backends: Backends, info: CodeInfo) -> Fake {
        Fake { told: Some((backends, info)), ..Fake::default() }
    }

    /// True once a future of `execute` is gone, at its end or before.
    pub(super) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::SeqCst)
    }

    pub(super) fn last(&self) -> CellRequest {
        self.asked.lock().unwrap().last().expect("the engine was asked").clone()
    }

    pub(super) fn runs(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

fn entry(id: &str, language: Language, cwd: Option<String>) -> SessionEntry {
    SessionEntry {
        session_id: id.to_owned(),
        language,
        cwd: cwd.unwrap_or_else(|| "/home/sandbox".to_owned()),
        created_at_ms: 1_700_000_000_000,
        last_used_ms: 1_700_000_001_000,
        age: Duration::from_millis(2_900),
        keeper: Keeper::Native { idle_max: Duration::from_secs(1800) },
        executing: false,
    }
}

fn plain(request: &CellRequest) -> Execution {
    Execution {
        language: request.language,
        code: request.code.clone(),
        status: Status::Ok,
        outputs: Vec::new(),
        stdout: String::new(),
        stderr: String::new(),
        exit_code: 0,
        execution_count: 1,
        session_id: match &request.session {
            SessionChoice::OneOff => None,
            SessionChoice::Named(id) => Some(id.clone()),
            SessionChoice::Generated => Some("generated-1".to_owned()),
        },
        kernel: match request.runner {
            Runner::Kernel(_) => Some("python3".to_owned()),
            Runner::Chosen => None,
        },
        msg_id: None,
        hint: None,
    }
}

/// Every kind of output, both streams and a hint.
fn rich(request: &CellRequest) -> Execution {
    let bundle = |value| Map::from_iter([("text/plain".to_owned(), value)]);
    Execution {
        status: Status::Error,
        exit_code: 1,
        execution_count: 3,
        outputs: vec![
            Output::Stream { name: Stream::Stdout, text: "out\n".to_owned() },
            Output::Stream { name: Stream::Stderr, text: "err\n".to_owned() },
            Output::ExecuteResult { data: bundle(json!("41")), metadata: Map::new(), execution_count: 3 },
            Output::DisplayData { data: bundle(json!("<Figure>")), metadata: Map::new() },
            process_error("boom"),
        ],
        stdout: "out\n".to_owned(),
        stderr: "err\n".to_owned(),
        hint: Some("session was reset: the daemon was restarted".to_owned()),
        ..plain(request)
    }
}

fn process_error(evalue: &str) -> Output {
    Output::Error(ErrorOutput {
        ename: "ProcessError".to_owned(),
        evalue: evalue.to_owned(),
        traceback: Vec::new(),
    })
}

fn run(request: &CellRequest) -> Result<Execution, Refusal> {
    match request.code.as_str() {
        "rich" => Ok(rich(request)),
        "timeout" => Ok(Execution { status: Status::Timeout, exit_code: 1, ..plain(request) }),
        "panic" => panic!("the fake was told to"),
        "many" => Err(Refusal::TooManySessions { max: 20 }),
        "many kernels" => Err(Refusal::TooManyKernelSessions { max: 5 }),
        "waiting" => Err(Refusal::TooManyWaiting { max: 8 }),
        "none" => Err(Refusal::NoInterpreter { language: "python", looked_for: "python3".to_owned() }),
        "cwd" => Err(Refusal::NotADirectory { cwd: "/nowhere".to_owned() }),
        "id" => Err(Refusal::InvalidSessionId("Session ids have 1 to 256 characters".to_owned())),
        "down" => Err(Refusal::ShuttingDown),
        "launch" => Err(Refusal::LaunchFailed),
        "print(1)" => Ok(Execution {
            outputs: vec![Output::Stream { name: Stream::Stdout, text: "1\n".to_owned() }],
            stdout: "1\n".to_owned(),
            ..plain(request)
        }),
        _ => Ok(plain(request)),
    }
}

pub(super) fn hello() -> Hello {
    let layer = |layer: &str, enforced, detail: &str| LayerReport {
        layer: layer.to_owned(),
        enforced,
        detail: detail.to_owned(),
        failed: (!enforced).then(|| "mkdir(/sys/fs/cgroup/x): EROFS".to_owned()),
        grant: (!enforced).then(|| "mount /sys/fs/cgroup writable".to_owned()),
    };
    Hello {
        posture: PostureReport {
            posture: Posture::Userns,
            layers: vec![
                layer("user namespace", true, "one per sandbox"),
                layer("cgroup memory", false, "nothing below /sys/fs/cgroup is writable"),
            ],
            root: false,
            uid: 1000,
        },
        python: Some(RuntimeReport {
            binary: "/usr/bin/python3".to_owned(),
            version: "3.11.2".to_owned(),
            host_binary: "/opt/caisson/python/bin/python3".to_owned(),
            ipykernel: Some("7.4.0".to_owned()),
        }),
        node: Some(RuntimeReport {
            binary: "/usr/bin/node".to_owned(),
            version: "v20.20.2".to_owned(),
            host_binary: "/usr/local/bin/node".to_owned(),
            ipykernel: None,
        }),
        kernels: Vec::new(),
        toolchains: None,
        accounts: vec!["sandbox".to_owned(), "nobody".to_owned()],
        warnings: vec!["KSM runs".to_owned(), "cannot write /proc/sys/user".to_owned()],
        spaces_to: crate::launcher::plan::SpaceId(0),
        warm: vec![Profile::Python],
    }
}

fn holds(tiers: Tiers, entry: &SessionEntry) -> bool {
    tiers.hold(&match &entry.keeper {
        Keeper::Kernel { name } => Tier::Kernel(name.clone()),
        Keeper::Native { .. } => Tier::Native(entry.language),
    })
}

impl CodeEngine for Fake {
    fn execute(&self, request: CellRequest) -> Pending<'_, Result<Execution, Refusal>> {
        self.asked.lock().unwrap().push(request.clone());
        let running = Running(Arc::clone(&self.dropped));
        Box::pin(async move {
            let _running = running;
            if let Some(watcher) = request.watcher.as_ref().filter(|_| request.code == "pieces") {
                pieces().into_iter().for_each(|piece| watcher.send(piece).unwrap());
            }
            if request.code == "forever" {
                request.watcher.as_ref().unwrap().send(pieces().remove(0)).unwrap();
                std::future::pending::<()>().await;
            }
            if request.code == "late refusal" {
                tokio::time::sleep(Duration::from_millis(900)).await;
                return Err(Refusal::ShuttingDown);
            }
            if let Some(times) = request.code.strip_prefix("sleep") {
                let times = times.trim().parse().unwrap_or(1);
                tokio::time::sleep(Duration::from_millis(300) * times).await;
            }
            run(&request)
        })
    }

    fn sessions_list(&self, tenant: &TenantId, tiers: Tiers) -> Vec<(String, SessionEntry)> {
        let sessions = self.sessions.lock().unwrap();
        let own = sessions.iter().filter(|((owner, _), entry)| *owner == tenant.0 && holds(tiers, entry));
        own.map(|((_, id), entry)| (id.clone(), entry.clone())).collect()
    }

    fn session_get(&self, tenant: &TenantId, tiers: Tiers, id: &str) -> Option<SessionEntry> {
        assert_ne!(id, "panic", "the fake was told to panic");
        let sessions = self.sessions.lock().unwrap();
        sessions.get(&(tenant.0.clone(), id.to_owned())).filter(|entry| holds(tiers, entry)).cloned()
    }

    fn session_create<'a>(
        &'a self,
        tenant: &'a TenantId,
        request: NewSession,
    ) -> Pending<'a, Result<(SessionEntry, bool), NotCreated>> {
        Box::pin(async move {
            match (request.cwd.as_deref(), request.user.as_deref()) {
                (Some("/nowhere"), _) => {
                    return Err(NotCreated::Refused(Refusal::NotADirectory { cwd: "/nowhere".to_owned() }));
                }
                (_, Some(user)) => {
                    let cell = CellRequest {
                        tenant: tenant.clone(),
                        language: request.language,
                        runner: Runner::Chosen,
                        watcher: None,
                        code: String::new(),
                        session: SessionChoice::Generated,
                        timeout: Duration::from_secs(1),
                        cwd: None,
                        user: None,
                        strict: false,
                    };
                    let outputs = vec![process_error(&format!("cannot run as {user}"))];
                    let failed = Execution { status: Status::Error, outputs, ..plain(&cell) };
                    return Err(NotCreated::Failed(Box::new(failed)));
                }
                _ => {}
            }
            let id = request.id.unwrap_or_else(|| "generated-1".to_owned());
            let mut entry = entry(&id, request.language, request.cwd);
            if let Runner::Kernel(name) = request.runner {
                entry.keeper = Keeper::Kernel { name: name.unwrap_or_else(|| "python3".to_owned()) };
            }
            let mut sessions = self.sessions.lock().unwrap();
            let place = (tenant.0.clone(), id);
            let made = !sessions.contains_key(&place);
            Ok((sessions.entry(place).or_insert(entry).clone(), made))
        })
    }

    fn session_delete<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers, id: &'a str) -> Pending<'a, bool> {
        Box::pin(async move {
            let mut sessions = self.sessions.lock().unwrap();
            let place = (tenant.0.clone(), id.to_owned());
            sessions.get(&place).is_some_and(|entry| holds(tiers, entry)) && sessions.remove(&place).is_some()
        })
    }

    fn sessions_clear<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers) -> Pending<'a, usize> {
        Box::pin(async move {
            let mut sessions = self.sessions.lock().unwrap();
            let before = sessions.len();
            sessions.retain(|(owner, _), entry| *owner != tenant.0 || !holds(tiers, entry));
            before - sessions.len()
        })
    }

    fn backends(&self) -> Backends {
        let kernels = vec!["python3".to_owned()];
        let usual =
            Backends { python: Some("native"), jupyter: Some("kernel"), kernels, ..Backends::default() };
        self.told.as_ref().map_or(usual, |(backends, _)| backends.clone())
    }

    fn kernel_info(&self, _: &TenantId) -> KernelInfo {
        KernelInfo {
            kernels: self.backends().kernels,
            detection: "ipykernel 7.4.0 via /usr/bin/python3".to_owned(),
            sessions: 0,
            sessions_max: 5,
            idle_max: Duration::from_secs(300),
        }
    }

    fn code_info<'a>(&'a self, _: &'a TenantId) -> Pending<'a, CodeInfo> {
        Box::pin(async {
            let usual = CodeInfo {
                backend: Some("native"),
                kernels: vec!["python3".to_owned()],
                python: Some("3.11.2".to_owned()),
                node: Some("v20.20.2".to_owned()),
                sessions_max: 20,
                prewarmed: 0,
            };
            self.told.as_ref().map_or(usual, |(_, info)| info.clone())
        })
    }

    fn hello(&self) -> Option<Arc<Hello>> {
        Some(Arc::new(hello()))
    }

    fn stats(&self) -> EngineStats {
        EngineStats { slots_max: 24, slots_ready: vec![(Profile::Python, 3)], ..EngineStats::default() }
    }
}
