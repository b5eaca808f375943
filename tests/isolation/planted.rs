//! Files that Python's libraries read at their start, planted wherever a tenant may write: they run for nobody
//! else, and never in a zygote.

use caisson::launcher::plan::{LaunchPlan, Profile};

use crate::support::stand::{fresh_space, text};
use crate::support::{own_stand, plan, proc};

/// Plants every file of that kind in every directory that can be written. Its marks: a line on stderr, a file,
/// an attribute of `sys`.
const PLANT: &str = r#"
import os, sys
payload = "import sys; sys.PLANTED = True; sys.stderr.write('PLANTED\\n'); open('/tmp/PLANTED', 'w').close()\n"
version = "python%d.%d" % sys.version_info[:2]
planted = []
for top in ("/home/sandbox", "/tmp", "/mnt/data", "/dev/shm"):
    files = {
        "usercustomize.py": payload, "sitecustomize.py": payload, "numpy.py": payload, "random.py": payload,
        "evil_backend.py": payload, "evil.pth": payload, "pyvenv.cfg": "home = " + top,
        "matplotlibrc": "backend: module://evil_backend\n",
        ".config/matplotlib/matplotlibrc": "backend: module://evil_backend\n",
        ".matplotlib/matplotlibrc": "backend: module://evil_backend\n",
        ".ipython/profile_default/startup/00-evil.py": payload,
        ".ipython/profile_default/ipython_config.py": payload,
        ".config/ipython/profile_default/startup/00-evil.py": payload,
        ".pythonrc.py": payload, ".pythonstartup": payload,
    }
    for site in (".local/lib/%s/site-packages" % version, "lib/%s/site-packages" % version):
        files[site + "/usercustomize.py"] = payload
        files[site + "/sitecustomize.py"] = payload
        files[site + "/evil.pth"] = payload
        files[site + "/evil_backend.py"] = payload
    for name, content in files.items():
        path = os.path.join(top, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(content)
        planted.append(path)
print(len(planted))
"#;

/// Uses what would read them.
const USE: &str = r#"
import os, sys
import matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot
pyplot.plot([1, 2]); pyplot.close("all")
import numpy, pandas, random
print(hasattr(sys, "PLANTED"), os.path.exists("/tmp/PLANTED"), matplotlib.get_backend().lower(), numpy.__name__)
"#;

#[test]
fn planted_start_files_run_in_no_zygote_and_for_no_other_tenant() {
    let stand = own_stand!(|_| {});
    let data = |space| LaunchPlan { profile: Profile::PythonData, ..plan(space) };
    let (theirs, mine) = (fresh_space(), fresh_space());
    let mut attacker = stand.guest(data(theirs));
    assert!(attacker.say(PLANT).parse::<usize>().is_ok_and(|count| count > 80));
    // Control: the files do run where they lie, in a Python that the tenant starts there.
    let own = attacker.say(
        "import subprocess, sys\n\
         run = lambda code: subprocess.run([sys.executable, '-c', code], cwd='/tmp', capture_output=True, text=True)\n\
         print('PLANTED' in run('import usercustomize').stderr, run('import sys; sys.path.remove(\"\"); import matplotlib; print(matplotlib.matplotlib_fname())').stdout.strip())",
    );
    assert_eq!(own, "True matplotlibrc", "control: the files have no effect even at home");

    // A new zygote, while the files lie there and the attacker lives.
    let before = stand.zygote(Profile::PythonData).expect("it serves");
    proc::kill(before);
    let after = stand.next_zygote(Profile::PythonData, before);
    let environment = text(format!("/proc/{after}/environ"));
    assert!(!environment.contains("HOME="), "{environment}");
    assert_eq!(std::fs::read_link(format!("/proc/{after}/cwd")).ok(), Some("/".into()));
    let writable: Vec<String> = text(format!("/proc/{after}/mountinfo"))
        .lines()
        .filter(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let options = fields[5].split(',').next();
            options == Some("rw") && fields[4] != "/proc" && !fields[4].starts_with("/dev/")
        })
        .map(str::to_owned)
        .collect();
    assert_eq!(writable, Vec::<String>::new(), "a zygote has a writable file system");

    let mut other = stand.guest(data(mine));
    assert!(other.is_fork());
    let answer = other.cell(USE);
    assert_eq!(answer.stdout.trim(), "False False agg numpy", "{answer:?}");
    assert!(!answer.stderr.contains("PLANTED"), "{answer:?}");
    assert!(!stand.log().contains("PLANTED"), "a zygote ran it: {}", stand.log());
    // The bare profile and an exec'd one of another tenant as well.
    for plan in [plan(mine), crate::support::strict(mine)] {
        let answer = stand
            .guest(plan)
            .cell("import sys, os, random; print(hasattr(sys, 'PLANTED'), os.path.exists('/tmp/PLANTED'))");
        assert_eq!(answer.stdout.trim(), "False False", "{answer:?}");
    }
}
