//! What a guest can send a descriptor to: nobody but itself. A socket that lingers would otherwise hold up whoever
//! drops it last.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use crate::support::stand::fresh_space;
use crate::support::{common_stand, plan};

const ENDPOINTS: &str = r#"
import json, os, socket, stat
kinds = []
for fd in range(5):
    mode = os.fstat(fd).st_mode
    kinds.append("pipe" if stat.S_ISFIFO(mode) else "null" if stat.S_ISCHR(mode) and os.fstat(fd).st_rdev == os.makedev(1, 3) else oct(mode))
beyond = []
for fd in range(5, 1024):
    try:
        beyond.append([fd, next((own for own in range(5) if os.path.sameopenfile(fd, own)), None)])
    except OSError:
        pass
sockets = []
for top, dirs, files in os.walk("/"):
    dirs[:] = [name for name in dirs if os.path.join(top, name) not in ("/proc", "/usr/share", "/usr/lib")]
    for name in files:
        try:
            if stat.S_ISSOCK(os.lstat(os.path.join(top, name)).st_mode):
                sockets.append(os.path.join(top, name))
        except OSError:
            pass
print(json.dumps({"kinds": kinds, "beyond": beyond, "sockets": sockets}))
"#;

#[test]
fn a_guest_holds_pipes_and_a_null_device_and_sees_no_socket_file() {
    let stand = common_stand!();
    let mut guest = stand.guest(plan(fresh_space()));
    let found = guest.ask(ENDPOINTS);
    assert_eq!(found["kinds"], serde_json::json!(["null", "pipe", "pipe", "pipe", "pipe"]));
    // Spares of 1 and 2, for the next cell.
    assert_eq!(found["beyond"], serde_json::json!([[62, 1], [63, 2]]));
    assert_eq!(found["sockets"], serde_json::json!([]));
    // Control: the search sees a socket that is there.
    guest.say("import socket; s = socket.socket(socket.AF_UNIX); s.bind('/tmp/own')");
    assert_eq!(guest.ask(ENDPOINTS)["sockets"], serde_json::json!(["/tmp/own"]));
}

#[test]
fn an_abstract_socket_of_the_host_cannot_be_reached() {
    let stand = common_stand!();
    let name = format!("caisson-isolation-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let _listener = UnixListener::bind_addr(&address).expect("an abstract name of our own");
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let port = tcp.local_addr().expect("it is bound").port();
    // Control: from here both can.
    assert!(UnixStream::connect_addr(&address).is_ok());
    assert!(std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let mut guest = stand.guest(plan(fresh_space()));
    let code = format!(
        "import socket\n\
         for family, address in ((socket.AF_UNIX, '\\0{name}'), (socket.AF_INET, ('127.0.0.1', {port}))):\n\
         \x20   try: socket.socket(family).connect(address); print('connected')\n\
         \x20   except OSError as error: print(error.errno)"
    );
    assert_eq!(guest.say(&code), "111\n111", "ECONNREFUSED: nobody is there");
}

/// Sixty-four sockets with unsent bytes and an hour to linger, in flight over each kind of channel a guest can
/// make, and tried on every descriptor it was given.
const LINGER: &str = r#"
import array, json, os, socket, struct
tries, kept, sent = [], [], {}
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
listener.bind(("127.0.0.1", 0)); listener.listen(128)
def lingering():
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one.connect(listener.getsockname())
    kept.append(listener.accept()[0])  # never read
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    one.setblocking(False)
    try:
        while True:
            one.send(b"x" * 65536)
    except BlockingIOError:
        pass
    return one
named = socket.socket(socket.AF_UNIX); named.bind("/tmp/named"); named.listen(1)
client = socket.socket(socket.AF_UNIX); client.connect("/tmp/named")
kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM, socket.SOCK_DGRAM)
pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
kept += [named, *pairs]
# A queue of datagrams holds ten.
for name, channel, count in (("stream", pairs[0][0], 16), ("seqpacket", pairs[1][0], 16), ("dgram", pairs[2][0], 8),
                             ("dgram", pairs[3][0], 8), ("named", client, 16)):
    for _ in range(count):
        one = lingering()
        channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno()]))])
        one.close(); sent[name] = sent.get(name, 0) + 1
for fd in range(5):
    try:
        channel = socket.socket(fileno=os.dup(fd))
        channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
        tries.append(fd)
    except OSError:
        pass
print(json.dumps({"sent": sent, "reached": tries}))
"#;

#[test]
fn lingering_sockets_in_flight_delay_neither_launcher_nor_neighbour() {
    let stand = common_stand!();
    let space = fresh_space();
    let mut guest = stand.guest(plan(space));
    let mut neighbour = stand.guest(plan(space));
    neighbour.say("print(0)");
    let answer = guest.ask(LINGER);
    // Control: they were sent, over what the guest made itself; no inherited descriptor takes one.
    let sent = serde_json::json!({"stream": 16, "seqpacket": 16, "dgram": 16, "named": 16});
    assert_eq!(answer, serde_json::json!({"sent": sent, "reached": []}));
    let slowest = |what: &mut dyn FnMut()| {
        let times = (0..10).map(|_| {
            let started = Instant::now();
            what();
            started.elapsed()
        });
        times.max().expect("ten of them")
    };
    // A linger of an hour against a bound that a busy machine keeps.
    let bound = Duration::from_secs(5);
    assert!(slowest(&mut || assert_eq!(neighbour.say("print(1)"), "1")) < bound);
    let started = Instant::now();
    guest.end();
    assert!(started.elapsed() < bound, "the end of the guest took {:?}", started.elapsed());
    assert!(slowest(&mut || stand.guest(plan(space)).end()) < bound);
}
