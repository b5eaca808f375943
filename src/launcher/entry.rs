//! The zygote's library: what a warmed interpreter calls to fork confined guests.
//!
//! `build.rs` makes `libcaisson.so` from this file, `child.rs`, `wire.rs` and `sys/raw.rs`; the binary embeds
//! it and the launcher lays it into the read-only template. It runs inside CPython: `core` only, static
//! buffers, one thread. Between two forks it writes nothing that depends on a request.

#![no_std]

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_long, c_uint};

mod child;
#[path = "../sys/raw.rs"]
mod raw;
mod wire;

use child::{Failed, Thread};
use wire::{FILTER_WORDS, FILTERS_MAX, JOB_BYTES, JOB_MAGIC, Job, slot, step};

const DESCRIPTORS_MAX: usize = 32;

struct State {
    thread: Thread,
    /// All second-layer filters, one after the other.
    filters: [u64; FILTER_WORDS],
    ends: [usize; FILTERS_MAX],
    filter_count: usize,
    job: Job,
    descriptors: [i32; DESCRIPTORS_MAX],
}

struct Cell(UnsafeCell<State>);

// SAFETY: a zygote has exactly one thread; it refuses to serve with a second one.
unsafe impl Sync for Cell {}

static STATE: Cell = Cell(UnsafeCell::new(State {
    thread: Thread { tid: 0, robust: (0, 0), rseq: (0, 0) },
    filters: [0; FILTER_WORDS],
    ends: [0; FILTERS_MAX],
    filter_count: 0,
    job: Job {
        magic: 0,
        uid: 0,
        gid: 0,
        namespaces: 0,
        cgroups: 0,
        landlock: 0,
        keep_groups: 0,
        unprivileged: 0,
        ends_with_parent: 0,
        _pad: 0,
        limits: [wire::Limit { resource: 0, _pad: 0, value: 0 }; wire::LIMITS_MAX],
        limit_count: 0,
    },
    descriptors: [-1; DESCRIPTORS_MAX],
}));

/// Named by the precompiled core library's unwind tables; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    raw::exit(101)
}

/// Notes what a fork needs: thread state and the second-layer filters. 0, or a negative errno.
///
/// # Safety
/// Called by the zygote's only thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn caisson_zygote_prepare(rseq_offset: c_long, rseq_size: c_uint) -> c_int {
    // SAFETY: one thread, and no reference of an earlier call is alive.
    let state = unsafe { &mut *STATE.0.get() };
    match prepare(state, rseq_offset as isize, rseq_size) {
        Ok(()) => 0,
        Err(errno) => -errno,
    }
}

/// Tells the launcher that this zygote serves: one byte, nothing else.
///
/// # Safety
/// `_report` is not read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn caisson_zygote_ready(socket: c_int, _report: *const c_char) -> c_int {
    match raw::send(socket, b"R", None) {
        Ok(()) => 0,
        Err(errno) => -errno,
    }
}

/// Forks a guest for each job on `socket`. Returns 0 in a confined guest; -1 in the zygote when the launcher is
/// gone.
///
/// # Safety
/// Called by the zygote's only thread, after `caisson_zygote_prepare`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn caisson_zygote_serve(socket: c_int) -> c_long {
    // SAFETY: one thread, and no reference of an earlier call is alive.
    let state = unsafe { &mut *STATE.0.get() };
    loop {
        let State { job, descriptors, .. } = state;
        let received = raw::receive(socket, wire::bytes_of_mut(job), descriptors);
        let Ok((length, count)) = received else { return -1 };
        if length == 0 {
            return -1;
        }
        #[cfg(bare)]
        if length == JOB_BYTES && job.magic == wire::BARE_MAGIC && count == slot::FIXED {
            match raw::fork(raw::CLONE_PARENT | raw::SIGCHLD) {
                Ok(0) => {
                    if child::arrange(descriptors).is_err() {
                        raw::exit(1);
                    }
                    return 0;
                }
                // Seen by who measures as the end of the pipes.
                Ok(_) | Err(_) => {}
            }
        }
        let complete = length == JOB_BYTES && job.magic == JOB_MAGIC && count == expected(job);
        if complete {
            // The launcher becomes the parent: a zygote's end is not its guests' end.
            match raw::fork(raw::CLONE_PARENT | raw::SIGCHLD) {
                Ok(0) => {
                    become_guest(state);
                    return 0;
                }
                Ok(_) => {}
                Err(errno) => report(descriptors[slot::STATUS], step::CLONE, errno),
            }
        }
        for fd in &descriptors[..count] {
            // Nothing to do about a close that fails: the number is free either way.
            let _ = raw::close(*fd);
        }
    }
}

/// Returns once the launcher has seen from outside that this guest is confined; ends it if it is not.
///
/// # Safety
/// Called once, by a guest that `caisson_zygote_serve` made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn caisson_zygote_await_release() {
    if child::wait_for_release().is_err() {
        raw::exit(1)
    }
}

fn expected(job: &Job) -> usize {
    let total = slot::FIXED + job.namespaces.count_ones() as usize + job.cgroups as usize;
    total.min(DESCRIPTORS_MAX + 1)
}

fn report(status: i32, step: u8, errno: raw::Errno) {
    // Nobody to tell when the pipe is gone as well.
    let _ = raw::write(status, &wire::status(step, errno));
}

fn become_guest(state: &State) {
    let status = state.descriptors[slot::STATUS];
    if let Err(failed) = child::move_in(&state.job, &state.descriptors, state.thread) {
        child::give_up(status, &failed);
    }
    let empty: &[u64] = &[];
    let mut programs = [empty; FILTERS_MAX];
    let mut start = 0;
    for (program, end) in programs.iter_mut().zip(&state.ends[..state.filter_count]) {
        *program = &state.filters[start..*end];
        start = *end;
    }
    let programs = &programs[..state.filter_count];
    if let Err(failed) = child::claim(&state.job, &state.descriptors, state.thread, programs, c"/home/sandbox") {
        // The status pipe has its fixed number from the step `Descriptors` on, its old one before.
        let Failed(step, _) = failed;
        let early = step == step::THREAD || step == step::DESCRIPTORS;
        child::give_up(if early { status } else { slot::STATUS as i32 }, &failed);
    }
}

fn prepare(state: &mut State, rseq_offset: isize, rseq_size: c_uint) -> raw::Answer<()> {
    state.thread.tid = raw::tid_address()?;
    state.thread.robust = raw::get_robust_list()?;
    if rseq_size != 0 {
        // The kernel takes no length below 32, glibc's own size until it grew.
        state.thread.rseq = (raw::thread_pointer().wrapping_add_signed(rseq_offset), rseq_size.max(32));
    }
    // Nobody of this uid but the launcher is to trace it, and entering an owned namespace would not end that.
    raw::prctl(raw::PR_SET_DUMPABLE, 0, 0)?;
    load_filters(state)
}

/// `second.bpf` holds, for each filter, its length in words and then the words.
fn load_filters(state: &mut State) -> raw::Answer<()> {
    let file = raw::openat(raw::AT_FDCWD, c"/opt/caisson/second.bpf", raw::O_RDONLY | raw::O_CLOEXEC)?;
    let mut filled = 0;
    loop {
        let Some(length) = read_word(file)? else { break };
        let length = length as usize;
        if state.filter_count == FILTERS_MAX || filled + length > FILTER_WORDS {
            return Err(raw::EINVAL);
        }
        for word in &mut state.filters[filled..filled + length] {
            *word = read_word(file)?.ok_or(raw::EINVAL)?;
        }
        filled += length;
        state.ends[state.filter_count] = filled;
        state.filter_count += 1;
    }
    raw::close(file)
}

fn read_word(file: i32) -> raw::Answer<Option<u64>> {
    let mut bytes = [0_u8; 8];
    match raw::read(file, &mut bytes)? {
        0 => Ok(None),
        8 => Ok(Some(u64::from_ne_bytes(bytes))),
        _ => Err(raw::EINVAL),
    }
}
