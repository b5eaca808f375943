//! How often one user may ask: for each kind of request a number within a window, off unless configured.
//!
//! The generic cell rate algorithm: of each user and kind one time is kept, until which what was admitted is spread at
//! the sustained rate. Nothing runs in the background.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::{Rate, Rates as Settings};
use crate::engine::Caller;

/// Users that are kept at least before those who are quiet are looked for.
const SWEEP_LEAST: usize = 1024;

/// The kinds of requests that are counted apart.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Window {
    Exec,
    Upload,
    Download,
    Listing,
}

impl Window {
    /// As a message has it: too many … requests.
    pub(crate) fn noun(self) -> &'static str {
        match self {
            Window::Exec => "execution",
            Window::Upload => "upload",
            Window::Download => "download",
            Window::Listing => "listing",
        }
    }
}

pub(crate) struct Rates {
    settings: Settings,
    spread: Mutex<Spread>,
}

#[derive(Default)]
struct Spread {
    until: HashMap<(Window, Caller), Instant>,
    /// Sweep when there are so many.
    sweep_at: usize,
}

impl Rates {
    pub(crate) fn new(settings: Settings) -> Rates {
        Rates { settings, spread: Mutex::default() }
    }

    /// Counts one request, or says how long to wait before the next.
    pub(crate) fn admit(&self, window: Window, caller: &Caller) -> Result<(), Duration> {
        self.admit_at(window, caller, Instant::now())
    }

    fn admit_at(&self, window: Window, caller: &Caller, now: Instant) -> Result<(), Duration> {
        let rate = self.rate(window);
        if rate.requests_max == 0 {
            return Ok(());
        }
        let mut spread = self.spread.lock().unwrap_or_else(PoisonError::into_inner);
        spread.sweep(now);
        let until = spread.until.entry((window, caller.clone())).or_insert(now);
        let next = (*until).max(now) + rate.window / rate.requests_max;
        match next.checked_duration_since(now + rate.window) {
            None | Some(Duration::ZERO) => {
                *until = next;
                Ok(())
            }
            Some(wait) => Err(wait),
        }
    }

    fn rate(&self, window: Window) -> Rate {
        match window {
            Window::Exec => self.settings.exec,
            Window::Upload => self.settings.upload,
            Window::Download => self.settings.download,
            Window::Listing => self.settings.listing,
        }
    }
}

impl Spread {
    /// Forgets who has been quiet for long enough to have everything again. Half of the calls between two sweeps pay for
    /// one, so a call costs the same however many users there are.
    fn sweep(&mut self, now: Instant) {
        if self.until.len() >= self.sweep_at.max(SWEEP_LEAST) {
            self.until.retain(|_, until| *until > now);
            self.sweep_at = self.until.len() * 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TenantId;

    fn caller(tenant: &str, user: Option<&str>) -> Caller {
        Caller { tenant: TenantId(tenant.to_owned()), user: user.map(str::to_owned) }
    }

    fn rates(requests_max: u32) -> Rates {
        let off = Rate { requests_max: 0, window: Duration::from_secs(30) };
        Rates::new(Settings { exec: Rate { requests_max, ..off }, upload: off, download: off, listing: off })
    }

    #[test]
    fn a_window_holds_so_many_requests_and_each_share_of_it_one_more() {
        let (rates, alice, start) = (rates(20), caller("t", Some("alice")), Instant::now());
        let at = |millis| rates.admit_at(Window::Exec, &alice, start + Duration::from_millis(millis));
        for _ in 0..20 {
            assert_eq!(at(0), Ok(()));
        }
        assert_eq!(at(0), Err(Duration::from_millis(1500)));
        assert_eq!(at(1000), Err(Duration::from_millis(500)), "a refused one is not counted");
        assert_eq!(at(1500), Ok(()));
        assert_eq!(at(1500), Err(Duration::from_millis(1500)));
        for _ in 0..20 {
            assert_eq!(at(60_000), Ok(()), "quiet for a window: everything again");
        }
        assert!(at(60_000).is_err());
    }

    #[test]
    fn users_tenants_and_kinds_are_counted_apart() {
        let (rates, now) = (rates(1), Instant::now());
        let admitted = |window, caller: &Caller| rates.admit_at(window, caller, now).is_ok();
        let alice = caller("t", Some("alice"));
        assert!(admitted(Window::Exec, &alice) && !admitted(Window::Exec, &alice));
        assert!(admitted(Window::Exec, &caller("t", Some("bob"))));
        assert!(admitted(Window::Exec, &caller("u", Some("alice"))));
        assert!(admitted(Window::Exec, &caller("t", None)));
        // Off.
        assert!((0..100).all(|_| admitted(Window::Upload, &alice)));
    }

    #[test]
    fn who_is_quiet_is_forgotten() {
        let (rates, start) = (rates(1), Instant::now());
        let kept = |rates: &Rates| rates.spread.lock().unwrap().until.len();
        for user in 0..SWEEP_LEAST {
            rates.admit_at(Window::Exec, &caller("t", Some(&user.to_string())), start).unwrap();
        }
        assert_eq!(kept(&rates), SWEEP_LEAST);
        rates.admit_at(Window::Exec, &caller("t", Some("late")), start + Duration::from_secs(31)).unwrap();
        assert_eq!(kept(&rates), 1);
    }
}
