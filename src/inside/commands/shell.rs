//! A stateful shell: a bash that takes its lines from a pipe of its own, with a terminal as its standard streams.
//!
//! The shell reads nonce, directory and text of a line from one descriptor and writes nonce, status and directory to
//! another when it is over. Neither is open in what the line runs, and the terminal is only ever the programs': no
//! output can be taken for the end of a line, and no prompt has to be recognized.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use rustix::pty::OpenptFlags;
use rustix::termios::{OptionalActions, OutputModes, Winsize};

use super::frame::{Event, Line, PATH_BYTES_MAX, Shell};
use super::process::{
    Feed, NotStarted, Piece, Process, directory, environment, home, is_directory, read_piece,
};
use crate::sys::terminal;

/// The first numbers that the shell's own two descriptors may get. Scripts use small ones, and bash itself those from 10.
const NUMBER_MIN: i32 = 200;
/// A terminal hands on what was written to it a moment later: so long after a line's end its output is still read.
const SETTLE: Duration = Duration::from_millis(10);
/// Longest report of the shell: two numbers and a path.
const REPORT_BYTES_MAX: usize = PATH_BYTES_MAX + 64;
const WINDOW: Winsize = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };

/// `set -m`: a program in the foreground gets the terminal's signals, and not this loop. `trap`: a request to end what runs
/// may come between two programs, when the foreground is the shell; they do not inherit it. The status is put back before
/// each line, so that `$?` is the last line's. A report begins with the end of whatever a line has written there.
const LOOP: &str = r#"
__caisson_status() { return "$1"; }
__caisson_s=0
shopt -s expand_aliases
trap : TERM
while IFS= read -r -d '' -u IN __caisson_n && IFS= read -r -d '' -u IN __caisson_d && IFS= read -r -d '' -u IN __caisson_c; do
  [ -z "$__caisson_d" ] || cd "-${__caisson_d:0:1}" -- "${__caisson_d:1}" >/dev/null 2>&1
  __caisson_status "$__caisson_s"
  eval "$__caisson_c" IN<&- OUT>&-
  __caisson_s=$?
  printf '\0%s %s %s\0' "$__caisson_n" "$__caisson_s" "$PWD" >&OUT
done
"#;

/// The way lines take into a shell, and the one their ends take out of it.
#[derive(Debug)]
pub(super) struct Lines {
    pub(super) feed: Feed,
    pub(super) reports: Option<OwnedFd>,
    heard: Vec<u8>,
    /// Ends that wait for the last of their output.
    settling: Vec<(Instant, Report)>,
    /// Our side of the terminal; `None` where none could be had.
    terminal: Option<OwnedFd>,
}

#[derive(Debug)]
struct Report {
    nonce: u32,
    status: u8,
    cwd: String,
}

/// Whether a terminal can be had here.
pub(super) fn has_terminal() -> bool {
    open_terminal().is_ok()
}

/// Both sides of a new terminal.
fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    let mut modes = rustix::termios::tcgetattr(&theirs)?;
    // Lines end as they were written: what is shown is read by programs.
    modes.output_modes.remove(OutputModes::ONLCR);
    rustix::termios::tcsetattr(&theirs, OptionalActions::Now, &modes)?;
    rustix::termios::tcsetwinsize(&theirs, WINDOW)?;
    Ok((ours, theirs))
}

/// Starts a shell. Where its session was last may be gone by now, and that must not be its end.
pub(super) fn start(shell: &Shell) -> Result<Process, NotStarted> {
    let dir = directory(shell.cwd.as_deref()).or_else(|_| directory(None))?;
    start_in(shell, &dir).map_err(|error| NotStarted::Failed(shell.shell.clone(), error))
}

fn start_in(shell: &Shell, dir: &Path) -> io::Result<Process> {
    let (lines_read, lines_write) = pipe_with(PipeFlags::CLOEXEC)?;
    let (reports_read, reports_write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&reports_read, true)?;
    let inherited = [for_the_shell(&lines_read)?, for_the_shell(&reports_write)?];
    let [input, output] = [inherited[0].as_raw_fd().to_string(), inherited[1].as_raw_fd().to_string()];
    let text = LOOP.replace("IN", &input).replace("OUT", &output);
    let terminal = open_terminal().ok();
    let prelude = if terminal.is_some() { "set -m" } else { "" };
    let mut command = Command::new(&shell.shell);
    command.args(["--noprofile", "--norc", "-c", &format!("{prelude}{text}")]).current_dir(dir);
    environment(&mut command, &shell.env);
    let (ours, streams) = match terminal {
        Some((ours, theirs)) => {
            command.env("TERM", "xterm-256color");
            command.stdin(theirs.try_clone()?).stdout(theirs.try_clone()?).stderr(theirs);
            terminal::lead(&mut command);
            let streams = (Some(ours.try_clone()?), Some(ours.try_clone()?));
            (Some(ours), streams)
        }
        None => {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
            command.stdin(Stdio::piped()).stdout(write.try_clone()?).stderr(write).process_group(0);
            (None, (None, Some(read)))
        }
    };
    let mut child = command.spawn()?;
    // Holds the other side of its streams.
    drop(command);
    drop(inherited);
    let (stdin, stdout) = streams;
    let stdin = stdin.or_else(|| child.stdin.take().map(OwnedFd::from));
    let mut process = Process::of(child, stdin, stdout, None)?;
    process.lines = Some(Lines {
        feed: Feed::new(Some(lines_write))?,
        reports: Some(reports_read),
        heard: Vec::new(),
        settling: Vec::new(),
        terminal: ours,
    });
    Ok(process)
}

/// A copy with a high number, which the next program started inherits.
fn for_the_shell(descriptor: &OwnedFd) -> io::Result<OwnedFd> {
    let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, NUMBER_MIN)?;
    rustix::io::fcntl_setfd(&copy, FdFlags::empty())?;
    Ok(copy)
}

impl Lines {
    /// Hands a line to the shell. False when it asks for a directory that is none.
    pub(super) fn push(&mut self, line: &Line) -> bool {
        let dir = line.cwd.as_ref().map(|cwd| home().join(cwd));
        let exists = dir.as_deref().is_none_or(is_directory);
        if line.strict && !exists {
            return false;
        }
        let letter = if line.keeps_links { 'L' } else { 'P' };
        let dir = dir.filter(|_| exists).map_or_else(String::new, |dir| format!("{letter}{}", dir.display()));
        for word in [&line.nonce.to_string(), &dir, &line.text] {
            // NUL ends a word; no script can hold one.
            self.feed.push(word.replace('\0', "").as_bytes());
            self.feed.push(b"\0");
        }
        self.feed.pump();
        true
    }

    /// Reads what the shell reports.
    pub(super) fn hear(&mut self, now: Instant) {
        if let Piece::Bytes(bytes) = read_piece(&mut self.reports) {
            self.heard.extend_from_slice(&bytes);
        }
        while let Some(end) = self.heard.iter().position(|byte| *byte == 0) {
            let report: Vec<u8> = self.heard.drain(..=end).collect();
            if let Some(report) = Report::read(&report[..end]) {
                self.settling.push((now + SETTLE, report));
            }
        }
        if self.heard.len() > REPORT_BYTES_MAX {
            // Not the shell's loop: there is nothing more to hear.
            self.reports = None;
            self.heard = Vec::new();
        }
    }

    /// Lines that are over, and whose output has been read.
    pub(super) fn settled(&mut self, now: Instant, number: u32) -> Vec<Event> {
        let over = self.settling.extract_if(.., |(at, _)| *at <= now);
        over.map(|(_, Report { nonce, status, cwd })| Event::Done { number, nonce, status, cwd }).collect()
    }

    /// When [`Lines::settled`] is to be asked again.
    pub(super) fn settles_at(&self) -> Option<Instant> {
        self.settling.iter().map(|(at, _)| *at).min()
    }

    /// The process group that has the terminal.
    pub(super) fn foreground(&self) -> Option<Pid> {
        rustix::termios::tcgetpgrp(self.terminal.as_ref()?.as_fd()).ok()
    }
}

impl Report {
    /// `NONCE STATUS PATH`.
    fn read(report: &[u8]) -> Option<Report> {
        let text = String::from_utf8_lossy(report);
        let (nonce, rest) = text.split_once(' ')?;
        let (status, cwd) = rest.split_once(' ')?;
        let fits = cwd.starts_with('/') && cwd.len() <= PATH_BYTES_MAX;
        let cwd = if fits { cwd.to_owned() } else { "/".to_owned() };
        Some(Report { nonce: nonce.parse().ok()?, status: status.parse().ok()?, cwd })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_and_nonsense_is_not() {
        let report = Report::read(b"7 130 /tmp/a b").expect("a report");
        assert_eq!((report.nonce, report.status, report.cwd.as_str()), (7, 130, "/tmp/a b"));
        for nonsense in [&b""[..], b"7", b"7 1", b"x 1 /", b"7 256 /", b"-1 0 /"] {
            assert!(Report::read(nonsense).is_none(), "{nonsense:?}");
        }
        assert_eq!(Report::read(b"7 0 relative").map(|it| it.cwd).as_deref(), Some("/"));
    }
}
