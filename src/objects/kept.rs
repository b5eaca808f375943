//! What the runs of kept sessions ask the store, remembered until it changes: their interpreters wait, and answer faster
//! than it does.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::{FileRecord, Pending, SessionInfo};

/// Sessions that something is remembered of, over all tenants.
const SESSIONS_MAX: usize = 1024;
/// Records that are remembered of one session; of one with more, nothing is.
const RECORDS_MAX: usize = 64;
/// How often a session's use is written down, in milliseconds; it counts as if it were so much later.
const NOTED_EVERY_MS: u64 = 60_000;

#[derive(Debug, Default)]
pub(super) struct Kept {
    /// How often something was forgotten: what was read before that is not remembered behind it.
    changes: u64,
    /// By what leads to them, and when they were used last, or later.
    led: HashMap<String, (SessionInfo, u64)>,
    /// What their workspaces have not heard of, and their files.
    workspaces: HashMap<String, (Pending, Vec<FileRecord>)>,
    /// Until when their use is written down.
    noted_ms: HashMap<String, u64>,
}

/// When something was looked up in the store, for [`Kept`] to know whether it changed meanwhile.
#[derive(Copy, Clone, Debug)]
pub(super) struct Since(u64);

impl Kept {
    pub(super) fn now(&self) -> Since {
        Since(self.changes)
    }

    pub(super) fn led(&self, affinity: &str) -> Option<&(SessionInfo, u64)> {
        self.led.get(affinity)
    }

    pub(super) fn workspace(&self, session: &str) -> Option<&(Pending, Vec<FileRecord>)> {
        self.workspaces.get(session)
    }

    pub(super) fn remember_led(&mut self, since: Since, affinity: String, info: &SessionInfo, used_ms: u64) {
        if since.0 == self.changes {
            insert(&mut self.led, affinity, (info.clone(), used_ms));
        }
    }

    pub(super) fn remember_workspace(
        &mut self,
        since: Since,
        session: String,
        known: &(Pending, Vec<FileRecord>),
    ) {
        let (pending, files) = known;
        if since.0 == self.changes && pending.place.len() + pending.remove.len() + files.len() <= RECORDS_MAX
        {
            insert(&mut self.workspaces, session, known.clone());
        }
    }

    /// A file of the session came or went, or its workspace heard of it.
    pub(super) fn forget_workspace(&mut self, session: &str) {
        self.changes += 1;
        self.workspaces.remove(session);
    }

    /// Sessions have ended.
    pub(super) fn forget_all(&mut self) {
        *self = Kept { changes: self.changes + 1, ..Kept::default() };
    }

    /// The time to be written down for a session that is used now, if that is due.
    pub(super) fn note(&mut self, session: &str, now_ms: u64) -> Option<u64> {
        if self.noted_ms.get(session).is_some_and(|until_ms| now_ms < *until_ms) {
            return None;
        }
        let until_ms = now_ms.saturating_add(NOTED_EVERY_MS);
        insert(&mut self.noted_ms, session.to_owned(), until_ms);
        Some(until_ms)
    }
}

/// Begins anew when it is full: that costs each session one look-up.
fn insert<T>(map: &mut HashMap<String, T>, key: String, value: T) {
    if map.len() >= SESSIONS_MAX && !map.contains_key(&key) {
        map.clear();
    }
    map.insert(key, value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Kind;

    #[test]
    fn what_was_read_before_a_change_is_not_remembered_behind_it() {
        let info = SessionInfo { id: "s".to_owned(), kind: Kind::Kept, space: None, read_only: false };
        let mut kept = Kept::default();
        let since = kept.now();
        kept.forget_workspace("other");
        kept.remember_led(since, "key".to_owned(), &info, 1);
        kept.remember_workspace(since, "s".to_owned(), &Default::default());
        assert_eq!((kept.led("key"), kept.workspace("s")), (None, None));
        let since = kept.now();
        kept.remember_led(since, "key".to_owned(), &info, 1);
        kept.remember_workspace(since, "s".to_owned(), &Default::default());
        assert!(kept.led("key").is_some() && kept.workspace("s").is_some());
        kept.forget_workspace("s");
        assert!(kept.led("key").is_some() && kept.workspace("s").is_none());
        kept.forget_all();
        assert_eq!(kept.led("key"), None);
    }

    #[test]
    fn a_use_is_written_down_before_what_is_written_is_over() {
        let mut kept = Kept::default();
        assert_eq!(kept.note("s", 1_000), Some(61_000));
        assert_eq!((kept.note("s", 60_999), kept.note("s", 61_000)), (None, Some(121_000)));
        for number in 0..2 * SESSIONS_MAX {
            kept.note(&number.to_string(), 1);
        }
        assert!(kept.noted_ms.len() <= SESSIONS_MAX);
    }
}
