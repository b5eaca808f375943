use std::os::fd::{AsFd, FromRawFd, OwnedFd};
fn main() {
    // dev driver
    let args: Vec<String> = std::env::args().collect();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let (ours, theirs) = caisson::sys::packet::pair().unwrap();
    let settings = caisson::launcher::settings::Settings {
        state_dir: "/var/lib/caisson-dev/launcher".into(),
        python_env: Some("/work/wt/house/target/runtime/python".into()),
        python_caches: Some("/work/wt/house/target/runtime/python-caches".into()),
        python_binary: None,
        node_binary: Some("/usr/bin/node".into()),
        policies_dir: None,
        posture_floor: caisson::launcher::posture::Posture::Process,
        cgroup: caisson::launcher::cgroup::CgroupLimits { memory_bytes: 512 << 20, pids: 128, cpu_millicores: 1000 },
        space: caisson::launcher::spaces::SpaceLimits { bytes: 480 << 20, inodes: 18000 },
        shm: caisson::launcher::spaces::SpaceLimits { bytes: 256 << 20, inodes: 4096 },
        nofile: 1024,
        shells_ready: 2,
        zygotes_off: args.iter().any(|a| a == "noz"),
    };
    std::fs::create_dir_all(&settings.state_dir).unwrap();
    match unsafe { caisson::sys::process::fork_as_first(0x2000_0000 | 0x2_0000) }.unwrap() {
        caisson::sys::process::Fork::Child => {
            drop(ours);
            let started = caisson::launcher::start::start(&settings, theirs);
            match started {
                Ok(started) => {
                    for l in &started.report.layers { eprintln!("{l:?}"); }
                    eprintln!("{:?}", started.report.posture);
                    if let Some(launcher) = started.launcher { eprintln!("end {:?}", launcher.run()); }
                }
                Err(e) => eprintln!("start error {e} {e:?}"),
            }
            std::process::exit(0);
        }
        caisson::sys::process::Fork::Parent(pid) => {
            drop(theirs);
            let rt = tokio::runtime::Runtime::new().unwrap();
            rt.block_on(async move {
                use caisson::launcher::{client::Client, plan::*};
                let c = Client::new();
                let c2 = c.clone();
                tokio::spawn(async move { let r = c2.attach(ours).await; eprintln!("attach ended {r:?}"); });
                let mut h = c.hello();
                while h.borrow().is_none() { h.changed().await.unwrap(); }
                eprintln!("hello {:?}", h.borrow().as_ref().unwrap().warm);
                let code = args.get(2).cloned().unwrap_or("print(1)".into());
                for profile in [Profile::Python, Profile::PythonData, Profile::Node] { for i in 0..5 {
                    let t = std::time::Instant::now();
                    let s = c.launch(LaunchPlan { space: SpaceId(1), profile, origin: if args.iter().any(|a| a == "strict") { Origin::Strict } else { Origin::Warm }, account: Account(0) }).await;
                    match s {
                        Ok(s) => {
                            let t1 = t.elapsed();
                            use tokio::io::*;
                            let mut w = tokio::net::unix::pipe::Sender::from_owned_fd(s.requests.try_clone().unwrap()).unwrap();
                            let r = tokio::net::unix::pipe::Receiver::from_owned_fd(s.events.try_clone().unwrap()).unwrap();
                            let mut o = tokio::net::unix::pipe::Receiver::from_owned_fd(s.stdout.try_clone().unwrap()).unwrap();
                            let mut e = tokio::net::unix::pipe::Receiver::from_owned_fd(s.stderr.try_clone().unwrap()).unwrap();
                            let code = if profile == Profile::Node { "console.log(process.getuid(), require('os').cpus().length)".into() } else { code.clone() };
                            w.write_all(format!("{}\n", serde_json::json!({"nonce":"n","code":code,"timeout_ms":1000})).as_bytes()).await.unwrap();
                            let mut line = String::new();
                            BufReader::new(r).read_line(&mut line).await.unwrap();
                            let t2 = t.elapsed();
                            let mut b = vec![0; 100000];
                            let n = o.try_read(&mut b).unwrap_or(0);
                            let m = { let mut b2 = vec![0; 10000]; let n = e.try_read(&mut b2).unwrap_or(0); String::from_utf8_lossy(&b2[..n]).into_owned() };
                            eprintln!("{profile:?} {i} launch {t1:?} total {t2:?} {:?} out {} err {m}", s.attestation, if i == 0 { String::from_utf8_lossy(&b[..n]).into_owned() + &line } else { line });
                            let mut ended = s.ended.clone();
                            drop(s);
                            let _ = tokio::time::timeout(std::time::Duration::from_secs(3), ended.changed()).await;
                            let e = *ended.borrow();
                            if i == 0 { eprintln!("ended {:?}", e); }
                        }
                        Err(e) => eprintln!("{profile:?} launch failed {e:?}"),
                    }
                } }
            });
            drop(rt);
            let _ = nix::sys::wait::waitpid(pid, None);
        }
    }
    let _ = (std::io::stderr().as_fd(), |x| unsafe { OwnedFd::from_raw_fd(x) });
}
