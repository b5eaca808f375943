//! From the seat of a taken zygote: its uid reaches nobody but the sandboxes it makes, its first layer refuses
//! what would change that, and whatever it says or does not say, the launcher goes on.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use caisson::launcher::plan::{LaunchPlan, Origin, Profile, Step};
use caisson::launcher::seccomp;
use caisson::launcher::settings::Settings;

use crate::support::stand::fresh_space;
use crate::support::{Stand, common_stand, missing, own_stand, plan, proc, skip, strict};

const PYTHON: &str = "/usr/bin/python3";
const SEAT: &str = include_str!("../probe/seat.py");
const LAYER: &str = include_str!("../probe/layer.py");
const FALSE_ZYGOTE: &str = include_str!("../probe/false_zygote.py");

pub(crate) type Answers = BTreeMap<String, BTreeMap<String, String>>;

/// What a process with this uid and no capability can do to each of them.
pub(crate) fn tries(uid: u32, targets: &[(&str, i32)]) -> Answers {
    let words = targets.iter().map(|(name, pid)| format!("{name}={pid}"));
    let output = Command::new(PYTHON)
        .args(["-I", "-c", SEAT])
        .args(words)
        .current_dir("/")
        .uid(uid)
        .gid(uid)
        .output()
        .expect("the system's Python starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Every try that worked, as "target: what".
fn worked(answers: &Answers) -> Vec<String> {
    let each =
        answers.iter().flat_map(|(name, tries)| tries.iter().map(move |(what, answer)| (name, what, answer)));
    each.filter(|(_, _, answer)| *answer == "done").map(|(name, what, _)| format!("{name}: {what}")).collect()
}

#[test]
fn the_uid_of_one_zygote_reaches_nobody_of_another() {
    if !Path::new(PYTHON).exists() {
        return skip("needs the system's Python");
    }
    let stand = common_stand!();
    let guest = stand.guest(plan(fresh_space()));
    let (own, other) = (stand.zygote(Profile::Python), stand.zygote(Profile::PythonData));
    let (own, other) = (own.expect("it serves"), other.expect("it serves"));
    let (own_uid, other_uid) = (proc::uid(own).expect("it lives"), proc::uid(other).expect("it lives"));
    assert_ne!(own_uid, other_uid, "two zygotes have one uid");
    let targets =
        [("launcher", stand.launcher), ("zygote", own), ("init", guest.init()), ("guest", guest.pid())];
    let answers = tries(other_uid, &targets);
    assert_eq!(worked(&answers), Vec::<String>::new());
    // The calls are refused for what they are, not for a target that is not there.
    for (name, answers) in &answers {
        for (what, answer) in answers {
            assert!(matches!(answer.as_str(), "EPERM" | "EACCES"), "{name}: {what}: {answer}");
        }
    }
    // Control: the same program as root does nearly all of it, on the same processes.
    let root = tries(0, &targets);
    for (name, answers) in &root {
        for what in ["kill", "ptrace", "process_vm_readv", "mem", "environ", "maps", "ns/mnt", "root", "fd"] {
            assert_eq!(answers[what], "done", "{name}: {what}");
        }
    }
    // Control: the owner of the guest's namespace may act on the guest, so the uid is what decides. This is why
    // a zygote's uid is used for nothing else.
    let owner = tries(own_uid, &[("guest", guest.pid())]);
    assert!(!worked(&owner).is_empty(), "{owner:?}");
    // Not on the zygote itself, which is not dumpable, nor on the launcher.
    let own_kind = tries(own_uid, &[("zygote", own), ("launcher", stand.launcher)]);
    assert_eq!(worked(&own_kind), ["zygote: kill"]);
}

#[test]
fn the_first_layer_refuses_what_a_zygote_must_not_do_even_to_root() {
    if let Some(reason) = missing() {
        return skip(reason);
    }
    let run = |filters: &[Vec<u8>]| -> BTreeMap<String, String> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut command = Command::new(PYTHON);
        if !filters.is_empty() {
            command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/harness/confine.py"));
            for (at, filter) in filters.iter().enumerate() {
                let file = dir.path().join(format!("{at}.bpf"));
                fs::write(&file, filter).expect("a file of our own");
                command.arg(file);
            }
            command.args(["--", PYTHON]);
        }
        // A mount namespace that nobody shares: the controls mount.
        let mut all = Command::new("unshare");
        all.args(["--mount", "--"]).arg(command.get_program()).args(command.get_args());
        let output = all.args(["-I", "-c", LAYER]).output().expect("unshare starts");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}"))
    };
    let policy = caisson::policy::load(None).expect("the defaults load");
    let programs = seccomp::compile(&policy.seccomp).expect("and compile");
    let first: Vec<Vec<u8>> = programs.first.iter().map(|program| program.bytes().to_vec()).collect();
    let (free, bound) = (run(&[]), run(&first));
    let needed = ["getpid", "clone"];
    for (what, answer) in &free {
        assert_eq!(answer, "done", "control without the layer: {what}");
        let wanted = if needed.contains(&what.as_str()) { "done" } else { "EPERM" };
        assert_eq!(bound[what], wanted, "under the layer: {what}");
    }
}

/// A launcher whose zygotes are ours. Their environment lies in the stand's `env`, and inside in `/opt/python`.
pub(crate) fn with_false_zygotes(
    mode: &str,
    change: impl FnOnce(&mut Settings),
) -> Result<Arc<Stand>, String> {
    if !Path::new(PYTHON).exists() {
        return Err("needs the system's Python".to_owned());
    }
    let env = crate::support::stand::fresh_dir();
    fs::create_dir(env.join("bin")).expect("a directory of our own");
    fs::set_permissions(&env, fs::Permissions::from_mode(0o755)).expect("a directory of our own");
    fs::write(env.join("bin/python3"), FALSE_ZYGOTE).expect("a file of our own");
    fs::set_permissions(env.join("bin/python3"), fs::Permissions::from_mode(0o755))
        .expect("a file of our own");
    fs::write(env.join("mode"), mode).expect("a file of our own");
    let stand = Stand::start(|settings| {
        settings.python_env = Some(env.clone());
        settings.python_caches = None;
        settings.shells_ready = 0;
        change(settings);
    });
    // The template has mounted it: the directory itself may go.
    if let Ok(stand) = &stand {
        fs::rename(&env, stand.dir.join("env")).expect("both are temporary");
    } else {
        fs::remove_dir_all(&env).expect("a directory of our own");
    }
    stand
}

macro_rules! false_zygotes {
    ($mode:expr) => {
        false_zygotes!($mode, |_| {})
    };
    ($mode:expr, $change:expr) => {
        match with_false_zygotes($mode, $change) {
            Ok(stand) => stand,
            Err(reason) => return skip(&reason),
        }
    };
}

#[test]
fn a_zygotes_domain_lets_it_reach_nobody_that_its_uid_alone_would() {
    if caisson::sys::raw::landlock_abi().unwrap_or(0) < 6 {
        return skip("signals have a scope from Landlock ABI 6 on");
    }
    let stand = false_zygotes!("reaches", |settings| settings.shells_ready = 1);
    let zygote = stand.zygote(Profile::Python).expect("it serves");
    let other = stand.zygote(Profile::PythonData).expect("it serves");
    // A shell made for it waits with its init, whose user namespace its uid owns.
    let space = fresh_space();
    let before = inits(&stand).len();
    drop(stand.guest(plan(space)));
    proc::until("a shell is ready", Duration::from_secs(20), || inits(&stand).len() > before);
    let uid = proc::uid(zygote).expect("it lives");
    let made = inits(&stand);
    let owned: Vec<i32> =
        made.into_iter().filter(|init| tries(uid, &[("init", *init)])["init"]["kill"] == "done").collect();
    let init = *owned.first().expect("control: without the domain its uid reaches such an init");
    let names = [("launcher", stand.launcher), ("zygote", other), ("init", init)];
    let inside = |pid: i32| {
        let pids = proc::pids_in_namespaces(pid);
        pids[proc::pids_in_namespaces(stand.launcher).len() - 1]
    };
    let words: Vec<String> = names.iter().map(|(name, pid)| format!("{name}={}", inside(*pid))).collect();
    // Complete or not there: it is read as soon as it is.
    fs::write(stand.dir.join("env/new"), words.join("\n")).expect("a directory of our own");
    fs::rename(stand.dir.join("env/new"), stand.dir.join("env/targets")).expect("a directory of our own");
    let answer = || stand.log().lines().find_map(|line| line.strip_prefix("REACHED ").map(str::to_owned));
    // Meanwhile the launcher has the zygote's uid again and again, for the moment that it takes to start an init.
    let busy = fresh_space();
    proc::until("it has tried", Duration::from_secs(60), || {
        drop(stand.launch(plan(busy)));
        answer().is_some()
    });
    let reached: Answers =
        serde_json::from_str(&answer().expect("it has tried")).expect("its answers are JSON");
    for what in ["signal 0", "SIGSTOP", "environ"] {
        assert_eq!(reached["itself"][what], "done", "control: {reached:?}");
    }
    for (name, _) in names {
        for what in ["signal 0", "SIGSTOP"] {
            assert_eq!(reached[name][what], "EPERM", "{name}: {what}");
        }
        let read = reached[name]["environ"].as_str();
        assert!(matches!(read, "EPERM" | "EACCES" | "ENOENT"), "{name}: {read}");
    }
    // The call itself is refused by the first layer, whoever is meant.
    assert!(reached.values().all(|tries| tries["ptrace"] == "EPERM"), "{reached:?}");
    assert!(proc::lives(stand.launcher) && proc::lives(other) && proc::lives(init));
    stand.still_launches();
}

/// Inits of the launcher's sandboxes.
fn inits(stand: &Stand) -> Vec<i32> {
    let depth = proc::pids_in_namespaces(stand.launcher).len();
    let is_init = |pid: &i32| {
        let pids = proc::pids_in_namespaces(*pid);
        pids.len() == depth + 1 && pids.last() == Some(&1) && proc::parent(*pid) == Some(stand.launcher)
    };
    proc::all().into_iter().filter(is_init).collect()
}

#[test]
fn a_zygote_that_dies_over_its_job_costs_a_retry_and_no_launch() {
    let stand = false_zygotes!("dies");
    for _ in 0..3 {
        let mut guest = stand.guest(plan(fresh_space()));
        assert_eq!(guest.say("print(2 + 2)"), "4");
        assert!(!guest.is_fork(), "it cannot have come from that zygote");
    }
    assert!(stand.log().contains("trying once more"), "{}", stand.log());
    stand.still_launches();
}

#[test]
fn a_zygote_that_claims_a_guest_it_did_not_make_is_found_out_and_ended() {
    let stand = false_zygotes!("lies");
    let before = stand.zygote(Profile::Python).expect("it serves");
    let trouble = stand.launch(plan(fresh_space())).err().expect("nobody is there to be released");
    assert_eq!(trouble.step, Step::Release);
    proc::until("the liar is gone", Duration::from_secs(5), || !proc::lives(before));
    // Until its successor lies in turn, interpreters are exec'd.
    assert_eq!(stand.guest(plan(fresh_space())).say("print(1)"), "1");
    stand.still_launches();
}

#[test]
fn a_zygote_that_answers_garbage_gets_an_answer_for_the_daemon_each_time() {
    let stand = false_zygotes!("garbles");
    let space = fresh_space();
    for _ in 0..8 {
        // One or the other, but always an answer.
        drop(stand.launch(plan(space)));
    }
    stand.still_launches();
}

#[test]
fn a_zygote_that_speaks_after_ready_is_ended_and_launches_go_on() {
    let stand = false_zygotes!("talks");
    let first = stand.zygote(Profile::Python);
    proc::until("it is ended for its second word", Duration::from_secs(10), || {
        first.is_none_or(|pid| !proc::lives(pid))
    });
    for _ in 0..4 {
        let mut guest = stand.guest(LaunchPlan { origin: Origin::Strict, ..plan(fresh_space()) });
        assert_eq!(guest.say("print(1)"), "1");
    }
    stand.still_launches();
}

#[test]
fn a_zygote_that_forked_enough_is_replaced_and_no_launch_is_execd_over_it() {
    // One ready shell for four plans at once: some find it, the others boot theirs across the change.
    let stand = own_stand!(|settings| {
        settings.zygote_forks_max = 5;
        settings.shells_ready = 1;
    });
    let first = stand.zygote(Profile::Python).expect("it serves");
    let first_uid = proc::uid(first).expect("it lives");
    let space = fresh_space();
    assert!(!stand.guest(strict(space)).is_fork(), "control: what is exec'd does not look forked");
    let (started, mut launched) = (Instant::now(), 0);
    let replaced = |stand: &Stand| stand.log().matches("replaced zygote ended").count();
    while replaced(&stand) < 3 {
        assert!(started.elapsed() < Duration::from_secs(100), "{launched} launches: {}", stand.log());
        for guest in stand.guests(plan(space), 4) {
            launched += 1;
            assert!(guest.is_fork(), "launch {launched} was exec'd: {}", stand.log());
            guest.end();
        }
    }
    assert!(!proc::lives(first), "the first one was to be replaced");
    let last = stand.zygote(Profile::Python).expect("its successor serves");
    assert_ne!(proc::uid(last), Some(first_uid), "a successor has a uid of its own");
    assert!(!stand.log().contains("trying once more"), "{}", stand.log());
    assert_eq!(stand.guest(plan(space)).say("print(1)"), "1");
}

#[test]
fn a_zygote_that_never_reads_cannot_hold_up_the_launcher() {
    let stand = false_zygotes!("deaf");
    let deaf = stand.zygote(Profile::Python).expect("it serves");
    let space = fresh_space();
    // More jobs than its socket has room for: the launcher must not wait for it to read one.
    let asked: Vec<u64> = {
        let mut seat = stand.seat();
        (0..300)
            .map(|_| {
                let seq = seat.next_seq();
                seat.send(&caisson::launcher::plan::Request::Launch { seq, plan: plan(space) }.encode());
                seq
            })
            .collect()
    };
    let started = Instant::now();
    let mut answers = 0;
    while answers < asked.len() && started.elapsed() < Duration::from_secs(240) {
        use caisson::launcher::plan::Reply;
        let reply = stand.seat().reply(Duration::from_secs(60));
        match reply {
            Some((Reply::Launched { sandbox, .. }, pipes)) => {
                answers += 1;
                drop(pipes);
                stand.end(sandbox);
            }
            Some((Reply::LaunchFailed { .. }, _)) => answers += 1,
            Some(_) => {}
            None => break,
        }
    }
    assert_eq!(answers, asked.len(), "{}", stand.log());
    assert!(!proc::lives(deaf), "it was left to swallow more");
    assert_eq!(stand.guest(strict(fresh_space())).say("print(1)"), "1");
}
