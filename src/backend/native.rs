//! The native backend: an interpreter of our own harness, from a slot when one fits, else launched now.
#![forbid(unsafe_code)]

use std::sync::Arc;

use tokio::sync::watch;

use crate::engine::Refusal;
use crate::harness::interpreter::{Interpreter, SetupFailed};
use crate::launcher::plan::{Account, LaunchPlan, Origin};
use crate::launcher::posture::Hello;
use crate::zygote::slots::{SlotStats, Slots, TakenFor};
use crate::zygote::{self, Launch};

/// Longest working directory, in bytes: what the Linux kernel takes as a path.
const CWD_BYTES_MAX: usize = 4095;

/// Gets interpreters.
pub struct Native {
    launcher: Arc<dyn Launch>,
    slots: Arc<Slots>,
}

impl Native {
    pub fn new(launcher: Arc<dyn Launch>, slots: Arc<Slots>) -> Native {
        Native { launcher, slots }
    }

    /// What the launcher reported, once one is attached.
    pub async fn hello(&self) -> Result<Arc<Hello>, Refusal> {
        zygote::attached(&*self.launcher).await.ok_or(Refusal::LaunchFailed)
    }

    /// What the launcher last reported, attached or not.
    pub fn last_hello(&self) -> Option<Arc<Hello>> {
        self.launcher.hello().borrow().clone()
    }

    /// What the launcher reports, now and later.
    pub fn subscribe(&self) -> watch::Receiver<Option<Arc<Hello>>> {
        self.launcher.hello()
    }

    /// Tells of each launcher that is gone.
    pub fn gone(&self) -> watch::Receiver<u64> {
        self.launcher.gone()
    }

    /// An interpreter that fits `plan`, started in `cwd`. Nothing of the guest's has run in it.
    pub async fn obtain(
        &self,
        plan: LaunchPlan,
        cwd: Option<&str>,
        taken_for: TakenFor,
    ) -> Result<Interpreter, Refusal> {
        if let Some(cwd) = cwd
            && (cwd.is_empty() || cwd.len() > CWD_BYTES_MAX || cwd.contains('\0'))
        {
            return Err(Refusal::NotADirectory { cwd: cwd.to_owned() });
        }
        let fits_a_slot = plan.origin == Origin::Warm && plan.account == Account(0) && plan.interpreter == 0;
        let slot = if fits_a_slot { self.slots.take((plan.space, plan.profile), taken_for) } else { None };
        let interpreter = match slot {
            Some(interpreter) => interpreter,
            None => self.launch(plan).await?,
        };
        match cwd {
            None => Ok(interpreter),
            Some(cwd) => interpreter.change_directory(cwd).await.map_err(|failed| match failed {
                SetupFailed::NotADirectory => Refusal::NotADirectory { cwd: cwd.to_owned() },
                SetupFailed::Gone => {
                    tracing::error!(space = %plan.space, "an interpreter did not survive its set-up");
                    Refusal::LaunchFailed
                }
            }),
        }
    }

    async fn launch(&self, plan: LaunchPlan) -> Result<Interpreter, Refusal> {
        self.launcher.launch(plan).await.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            tracing::error!(space = %plan.space, profile = plan.profile.name(), %error, source, "launch failed");
            Refusal::LaunchFailed
        })
    }

    /// Tells the slots' refiller that a cell starts now.
    pub fn cell_starts(&self) {
        self.slots.cell_started();
    }

    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    pub fn slot_stats(&self) -> SlotStats {
        self.slots.stats()
    }

    pub fn sandboxes_live(&self) -> usize {
        self.launcher.sandboxes_live()
    }
}

/// A launcher for tests that hands out fake interpreters.
#[cfg(test)]
pub(crate) mod fake {
    use std::io;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use tokio::sync::watch;

    use super::*;
    use crate::harness::fake::Fake;
    use crate::launcher::client::LaunchError;
    use crate::launcher::plan::{Profile, SpaceId, Step};
    use crate::launcher::posture::{Posture, PostureReport, RuntimeReport};
    use crate::zygote::{Deleting, Launching, Opening};

    pub(crate) fn hello() -> Hello {
        let runtime = |binary: &str| RuntimeReport {
            binary: format!("/usr/bin/{binary}"),
            version: "1.0".to_owned(),
            host_binary: format!("/usr/bin/{binary}"),
            ipykernel: None,
        };
        Hello {
            posture: PostureReport { posture: Posture::Full, layers: Vec::new(), root: true, uid: 0 },
            python: Some(runtime("python3")),
            node: Some(runtime("node")),
            kernels: Vec::new(),
            toolchains: None,
            accounts: vec!["sandbox".to_owned(), "nobody".to_owned()],
            warm: vec![Profile::Python, Profile::PythonData],
            warnings: Vec::new(),
            spaces_to: SpaceId(0),
        }
    }

    pub(crate) struct FakeLauncher {
        hello: watch::Sender<Option<Arc<Hello>>>,
        gone: watch::Sender<u64>,
        pub(crate) plans: Mutex<Vec<LaunchPlan>>,
        pub(crate) deleted: Mutex<Vec<SpaceId>>,
        pub(crate) attached: AtomicBool,
        pub(crate) broken: AtomicBool,
        launched: AtomicU64,
    }

    impl FakeLauncher {
        pub(crate) fn with(hello: Hello) -> Arc<FakeLauncher> {
            Arc::new(FakeLauncher {
                hello: watch::channel(Some(Arc::new(hello))).0,
                gone: watch::channel(0).0,
                plans: Mutex::default(),
                deleted: Mutex::default(),
                attached: AtomicBool::new(true),
                broken: AtomicBool::new(false),
                launched: AtomicU64::new(0),
            })
        }

        /// Says hello again, as a launcher does that was started again.
        pub(crate) fn attach(&self) {
            self.attached.store(true, Ordering::SeqCst);
            self.hello.send_modify(|_| {});
        }

        /// Is gone, as after a kill. Its interpreters must have been told to be `lost` before.
        pub(crate) fn vanish(&self) {
            self.gone.send_modify(|count| *count += 1);
        }

        pub(crate) fn launched(&self) -> u64 {
            self.launched.load(Ordering::SeqCst)
        }
    }

    impl Launch for FakeLauncher {
        fn launch(&self, plan: LaunchPlan) -> Launching<'_> {
            Box::pin(async move {
                if self.broken.load(Ordering::SeqCst) {
                    let source = io::Error::from_raw_os_error(1);
                    return Err(LaunchError::Step { step: Step::Clone, source });
                }
                self.plans.lock().expect("no test panics here").push(plan);
                let id = self.launched.fetch_add(1, Ordering::SeqCst) + 1;
                Ok(if plan.profile == Profile::Kernel { Fake::kernel(id) } else { Fake::with_id(id) })
            })
        }

        fn sandbox(&self, _: LaunchPlan) -> Opening<'_> {
            Box::pin(async { Err(LaunchError::Gone) })
        }

        fn delete_space(&self, space: SpaceId) -> Deleting<'_> {
            self.deleted.lock().expect("no test panics here").push(space);
            Box::pin(async { Ok(()) })
        }

        fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>> {
            self.hello.subscribe()
        }

        fn gone(&self) -> watch::Receiver<u64> {
            self.gone.subscribe()
        }

        fn is_attached(&self) -> bool {
            self.attached.load(Ordering::SeqCst)
        }

        fn sandboxes_live(&self) -> usize {
            0
        }
    }
}
