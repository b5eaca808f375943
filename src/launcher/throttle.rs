//! Lines that the daemon can make the launcher log are bounded: a taken one must not fill the disk, nor bury what
//! it did under a million lines of the same.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(1);
/// Lines in one window; the rest is counted.
const LINES_MAX: u32 = 10;

/// Decides which lines are written.
#[derive(Debug)]
pub struct Throttle {
    since: Instant,
    written: u32,
    left_out: u64,
}

impl Throttle {
    pub fn new(now: Instant) -> Throttle {
        Throttle { since: now, written: 0, left_out: 0 }
    }

    /// Whether a line may be written now; else it is counted.
    pub fn admits(&mut self, now: Instant) -> bool {
        // While a count is to be told the window stays: it is told first.
        if self.left_out == 0 && now >= self.since + WINDOW {
            self.since = now;
            self.written = 0;
        }
        let admitted = self.written < LINES_MAX;
        if admitted {
            self.written += 1;
        } else {
            self.left_out += 1;
        }
        admitted
    }

    /// When the number of lines left out is to be told.
    pub fn due(&self) -> Option<Instant> {
        (self.left_out > 0).then(|| self.since + WINDOW)
    }

    /// The number of lines left out, once their window is over.
    pub fn take_left_out(&mut self, now: Instant) -> Option<u64> {
        self.due().filter(|due| now >= *due)?;
        self.since = now;
        self.written = 0;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_written_in_part_and_counted_whole() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        let written = (0..1_000).filter(|_| throttle.admits(start)).count();
        assert_eq!(written, LINES_MAX as usize);
        assert_eq!(throttle.take_left_out(start), None, "the window is not over");
        assert_eq!(throttle.due(), Some(start + WINDOW));
        assert_eq!(throttle.take_left_out(start + WINDOW), Some(1_000 - u64::from(LINES_MAX)));
        assert_eq!(throttle.due(), None);
    }

    #[test]
    fn lines_that_come_slowly_are_all_written() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        assert!((0..100).all(|n| throttle.admits(start + n * (WINDOW / LINES_MAX) + n * WINDOW / 100)));
        assert_eq!(throttle.due(), None);
    }

    #[test]
    fn after_a_flood_lines_are_written_again() {
        let start = Instant::now();
        let mut throttle = Throttle::new(start);
        while throttle.admits(start) {}
        assert_eq!(throttle.take_left_out(start + WINDOW), Some(1));
        assert!(throttle.admits(start + WINDOW));
    }
}
