//! One command: its process, what flows into it and out of it, and when it is over.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Access, CWD, FileType, MemfdFlags, Mode, OFlags, access};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::frame::{ANSWERS_PIPE, CALLS_PIPE, CHUNK_BYTES_MAX, Exit, Program, Source, Start};
use super::shell::Lines;

/// How long output is still waited for once a command has ended: a child it left behind may hold the pipe for ever.
const LATE_OUTPUT_MAX: Duration = Duration::from_millis(200);
/// Longest script that is handed over as an argument. The Linux kernel takes 128 KiB.
const ARGUMENT_BYTES_MAX: usize = 100 * 1024;
/// What shells answer for a program that is not there, and for one that does not run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// Why nothing was started.
#[derive(Debug)]
pub(super) enum NotStarted {
    NotADirectory,
    /// The program's name, and why it does not run.
    Failed(String, io::Error),
}

impl NotStarted {
    /// As a shell would end for it.
    pub(super) fn exit(&self) -> Exit {
        match self {
            NotStarted::Failed(_, error) if error.kind() == io::ErrorKind::NotFound => Exit::Code(NOT_FOUND),
            _ => Exit::Code(NOT_RUN),
        }
    }
}

/// Bytes on their way into a pipe or terminal that may take its time.
#[derive(Debug)]
pub(super) struct Feed {
    to: Option<OwnedFd>,
    /// Bounded by the daemon: input by what it has been told was taken, answers by the calls of a program.
    pending: VecDeque<u8>,
    /// Closed once everything is written.
    ends: bool,
}

impl Feed {
    pub(super) fn new(to: Option<OwnedFd>) -> io::Result<Feed> {
        if let Some(to) = &to {
            rustix::io::ioctl_fionbio(to, true)?;
        }
        Ok(Feed { to, pending: VecDeque::new(), ends: false })
    }

    /// Into nothing.
    fn none() -> Feed {
        Feed { to: None, pending: VecDeque::new(), ends: false }
    }

    /// What waits for room.
    pub(super) fn waiting(&self) -> Option<&OwnedFd> {
        self.to.as_ref().filter(|_| !self.pending.is_empty())
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.pending.extend(bytes);
    }

    pub(super) fn end(&mut self) {
        self.ends = true;
    }

    /// Writes what goes in now. Returns how many bytes are off its hands: written, or nobody's any more.
    pub(super) fn pump(&mut self) -> usize {
        let mut taken = 0;
        while let Some(to) = &self.to {
            let (first, _) = self.pending.as_slices();
            if first.is_empty() {
                break;
            }
            match rustix::io::write(to, first) {
                Ok(written) => {
                    self.pending.drain(..written);
                    taken += written;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return taken,
                Err(_) => self.to = None,
            }
        }
        if self.to.is_none() {
            taken += self.pending.len();
            self.pending = VecDeque::new();
        } else if self.ends && self.pending.is_empty() {
            self.to = None;
        }
        taken
    }

    /// Nobody reads any more. Returns how many bytes were given up.
    pub(super) fn close(&mut self) -> usize {
        self.to = None;
        self.pump()
    }
}

/// What a read of a stream brought.
pub(super) enum Piece {
    Bytes(Vec<u8>),
    Nothing,
    Closed,
}

/// A command that was started.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    pid: Pid,
    /// Readable once the process has ended.
    pub(super) life: Option<OwnedFd>,
    pub(super) stdin: Feed,
    pub(super) stdout: Option<OwnedFd>,
    pub(super) stderr: Option<OwnedFd>,
    ended: Option<(Exit, Instant)>,
    pub(super) told: bool,
    /// Of a stateful shell.
    pub(super) lines: Option<Lines>,
    /// Of a command that calls tools: what it has called, and the way of the answers.
    pub(super) calls: Option<OwnedFd>,
    pub(super) answers: Feed,
}

impl Process {
    pub(super) fn start(start: &Start) -> Result<Process, NotStarted> {
        if let Some(source) = &start.source {
            lay(source).map_err(|error| NotStarted::Failed(source.name.clone(), error))?;
        }
        let pipes = start.calls.as_deref().map(|folder| pipes_of_calls(Path::new(folder))).transpose();
        let pipes = pipes.map_err(|error| NotStarted::Failed("the pipes of its calls".to_owned(), error))?;
        let dir = directory(start.cwd.as_deref())?;
        let mut script = None;
        let mut command = match &start.program {
            Program::Words(words) => {
                let (program, arguments) = words.split_first().ok_or_else(|| nothing_to_run(""))?;
                let mut command = command_of(program, &start.env);
                command.args(arguments);
                command
            }
            Program::Script { shell, text } => {
                let mut command = command_of(shell, &start.env);
                command.arg("-c");
                if text.len() <= ARGUMENT_BYTES_MAX {
                    command.arg(text);
                } else {
                    let file = in_memory(text).map_err(|error| NotStarted::Failed(shell.clone(), error))?;
                    command.arg(format!(". /dev/fd/{}", file.as_raw_fd()));
                    script = Some(file);
                }
                command
            }
        };
        environment(&mut command, &start.env);
        command.current_dir(dir).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = command.spawn();
        drop(script);
        let name = || start.program.name().to_owned();
        let mut child = spawned.map_err(|error| NotStarted::Failed(name(), error))?;
        let stdin = child.stdin.take().map(OwnedFd::from);
        let (stdout, stderr) =
            (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
        let mut process =
            Process::of(child, stdin, stdout, stderr).map_err(|error| NotStarted::Failed(name(), error))?;
        if start.stdin_ends {
            process.stdin.close();
        }
        if let Some((calls, answers)) = pipes {
            process.calls = Some(calls);
            process.answers = Feed::new(Some(answers)).map_err(|error| NotStarted::Failed(name(), error))?;
        }
        Ok(process)
    }

    /// Takes over a child and our ends of its streams.
    pub(super) fn of(
        mut child: Child,
        stdin: Option<OwnedFd>,
        stdout: Option<OwnedFd>,
        stderr: Option<OwnedFd>,
    ) -> io::Result<Process> {
        let pid = Pid::from_child(&child);
        let arrange = || -> io::Result<(OwnedFd, Feed)> {
            for stream in [&stdout, &stderr].into_iter().flatten() {
                rustix::io::ioctl_fionbio(stream, true)?;
            }
            Ok((rustix::process::pidfd_open(pid, PidfdFlags::empty())?, Feed::new(stdin)?))
        };
        match arrange() {
            Ok((life, stdin)) => Ok(Process {
                calls: None,
                answers: Feed::none(),
                child,
                pid,
                life: Some(life),
                stdin,
                stdout,
                stderr,
                ended: None,
                told: false,
                lines: None,
            }),
            Err(error) => {
                // Nobody would ever hear of its end.
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }

    /// Takes note of the end, if it has come.
    pub(super) fn reap(&mut self) -> io::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            self.life = None;
            self.ended = Some((exit(status), Instant::now() + LATE_OUTPUT_MAX));
        }
        Ok(())
    }

    /// Its end, when it is time to tell it: everything has been read, or has been waited for.
    pub(super) fn over(&self, now: Instant) -> Option<Exit> {
        let (exit, late_at) = self.ended?;
        let is_silent = self.stdout.is_none() && self.stderr.is_none();
        (!self.told && (is_silent || now >= late_at)).then_some(exit)
    }

    /// When [`Process::over`] is to be asked again.
    pub(super) fn late_at(&self) -> Option<Instant> {
        self.ended.filter(|_| !self.told).map(|(_, late_at)| late_at)
    }

    /// Told, and nothing can come any more.
    pub(super) fn is_forgotten(&self) -> bool {
        self.told && self.stdout.is_none() && self.stderr.is_none()
    }

    /// A process that has ended keeps no number that could be somebody else's by now.
    pub(super) fn signal(&self, signal: Signal) {
        if self.ended.is_none() {
            let group = self.lines.as_ref().and_then(Lines::foreground).unwrap_or(self.pid);
            // A group that has just gone is no fault of who asked.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}

/// One read of a stream that is ready.
pub(super) fn read_piece(stream: &mut Option<OwnedFd>) -> Piece {
    let Some(open) = &stream else { return Piece::Nothing };
    let mut bytes = vec![0; CHUNK_BYTES_MAX];
    match rustix::io::read(open, &mut bytes) {
        Ok(length) if length > 0 => {
            bytes.truncate(length);
            Piece::Bytes(bytes)
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Piece::Nothing,
        // A terminal that nobody holds any more answers EIO.
        Ok(_) | Err(_) => {
            *stream = None;
            Piece::Closed
        }
    }
}

/// Where a command starts.
pub(super) fn directory(cwd: Option<&str>) -> Result<PathBuf, NotStarted> {
    let dir = home().join(cwd.unwrap_or_default());
    if is_directory(&dir) { Ok(dir) } else { Err(NotStarted::NotADirectory) }
}

pub(super) fn is_directory(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_dir())
}

pub(super) fn home() -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from)
}

/// A program that is found already. The standard library leaves a search along a changed `PATH` to a fork of ours, which
/// costs as much as all of a small program's start; one with a path it starts without.
fn command_of(name: &str, env: &[(String, Option<String>)]) -> Command {
    let set = env.iter().rev().find(|(variable, _)| variable == "PATH");
    let path = set.map_or_else(|| std::env::var_os("PATH"), |(_, value)| value.as_ref().map(OsString::from));
    let found = match path {
        Some(path) if !name.contains('/') => std::env::split_paths(&path)
            // One that depends on the working directory is the search's.
            .take_while(|folder| folder.is_absolute())
            .map(|folder| folder.join(name))
            .find(|file| file.is_file() && access(file, Access::EXEC_OK).is_ok()),
        _ => None,
    };
    let mut command = Command::new(found.as_deref().unwrap_or(Path::new(name)));
    command.arg0(name);
    command
}

/// The agent's own, and what was asked for.
pub(super) fn environment(command: &mut Command, more: &[(String, Option<String>)]) {
    command.env_clear().envs(std::env::vars_os());
    for (name, value) in more {
        match value {
            // The standard library panics over a name that no environment can hold.
            _ if name.is_empty() || name.contains(['=', '\0']) => {}
            Some(value) => drop(command.env(name, OsString::from(value))),
            None => drop(command.env_remove(name)),
        }
    }
}

pub(super) fn nothing_to_run(name: &str) -> NotStarted {
    NotStarted::Failed(name.to_owned(), io::Error::from(io::ErrorKind::NotFound))
}

/// Writes a command's own file. The folder is a fresh one: who is there already is not it.
fn lay(source: &Source) -> io::Result<()> {
    let folder = Path::new(&source.folder);
    DirBuilder::new().mode(0o700).create(folder)?;
    std::fs::write(folder.join(&source.name), &source.text)
}

/// Both are held open from both sides: a stub that comes and goes ends nothing.
fn pipes_of_calls(folder: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    let make = |name: &str| -> io::Result<OwnedFd> {
        let path = folder.join(name);
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::from_bits_truncate(0o600), 0)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&path, flags, Mode::empty())?)
    };
    Ok((make(CALLS_PIPE)?, make(ANSWERS_PIPE)?))
}

/// A file without a name, which the next program started inherits.
fn in_memory(text: &str) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("script", MemfdFlags::empty())?;
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let written = rustix::io::write(&file, rest)?;
        rest = &rest[written..];
    }
    Ok(file)
}

fn exit(status: ExitStatus) -> Exit {
    match (status.code(), status.signal()) {
        (Some(code), _) => Exit::Code(code as u8),
        (None, signal) => Exit::Signal(signal.unwrap_or_default() as u8),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What would be started for `name` with this `PATH`.
    fn found(name: &str, path: Option<&str>) -> String {
        let env =
            [("PATH".to_owned(), Some("/nowhere".to_owned())), ("PATH".to_owned(), path.map(str::to_owned))];
        command_of(name, &env).get_program().to_string_lossy().into_owned()
    }

    #[test]
    fn a_program_is_the_first_of_its_name_along_the_path_that_may_be_run() {
        let top = tempfile::tempdir().expect("a folder");
        let top = top.path().to_str().expect("text");
        for folder in ["folder", "plain", "own", "later"] {
            std::fs::create_dir_all(format!("{top}/{folder}")).expect("made");
        }
        std::fs::create_dir(format!("{top}/folder/tool")).expect("made");
        for (file, mode) in [("plain/tool", 0o644), ("own/tool", 0o755), ("later/tool", 0o755)] {
            let file = format!("{top}/{file}");
            std::fs::write(&file, "#!/bin/sh\n").expect("written");
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).expect("changed");
        }
        let path = format!("{top}/missing:{top}/folder:{top}/plain:{top}/own:{top}/later");
        assert_eq!(found("tool", Some(&path)), format!("{top}/own/tool"));
        assert_eq!(found("other", Some(&path)), "other", "the search itself says that there is none");
        assert_eq!(found("./tool", Some(&path)), "./tool");
        assert_eq!(
            found("tool", Some(&format!("bin:{top}/own"))),
            "tool",
            "that folder is the working directory's"
        );
        assert_eq!(found("tool", None), "tool");
    }

    #[test]
    fn it_is_called_by_the_name_that_was_asked_for() {
        let mut command = command_of("sh", &[]);
        assert!(Path::new(command.get_program()).is_absolute());
        let said = command.args(["-c", "echo $0"]).output().expect("it runs");
        assert_eq!(said.stdout, b"sh\n");
    }
}
