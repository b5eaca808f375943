//! What the compiler expects of a platform that has no library: the entry point and the memory functions.
//! Part of a sandbox's init only.

use core::arch::{asm, global_asm};

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "and rsp, -16",
    "call caisson_init",
    "ud2"
);

#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x29, #0", "bl caisson_init", "brk #1");

/// One byte at a time, in a way the compiler cannot turn back into a call of these functions.
#[inline(always)]
fn opaque<T>(value: T) -> T {
    // SAFETY: an empty instruction.
    unsafe { asm!("", options(nomem, nostack, preserves_flags)) };
    value
}

/// # Safety
/// As `memcpy` of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    let mut index = 0;
    while opaque(index) < count {
        // SAFETY: the caller vouches for `count` bytes behind both pointers.
        unsafe { *to.add(index) = *from.add(index) };
        index += 1;
    }
    to
}

/// # Safety
/// As `memmove` of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if (to as usize) <= (from as usize) {
        // SAFETY: forward copying is right when the target lies before the source.
        return unsafe { memcpy(to, from, count) };
    }
    let mut index = count;
    while opaque(index) > 0 {
        index -= 1;
        // SAFETY: the caller vouches for `count` bytes behind both pointers.
        unsafe { *to.add(index) = *from.add(index) };
    }
    to
}

/// # Safety
/// As `memset` of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    let mut index = 0;
    while opaque(index) < count {
        // SAFETY: the caller vouches for `count` bytes behind `to`.
        unsafe { *to.add(index) = byte as u8 };
        index += 1;
    }
    to
}

/// # Safety
/// As `memcmp` of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    let mut index = 0;
    while opaque(index) < count {
        // SAFETY: the caller vouches for `count` bytes behind both pointers.
        let (left, right) = unsafe { (*a.add(index), *b.add(index)) };
        if left != right {
            return i32::from(left) - i32::from(right);
        }
        index += 1;
    }
    0
}

/// # Safety
/// As `bcmp` of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, count: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(a, b, count) }
}
