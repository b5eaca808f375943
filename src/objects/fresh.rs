//! Sessions that have no file yet. Most runs leave none, so such a session is kept here only, and written down with its
//! first file.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};

use super::SessionInfo;
use crate::engine::Caller;

/// Sessions without a file that are remembered, over all tenants; the oldest go first. With one of them nothing is
/// lost but the answer to its listing, which is empty.
const FRESH_MAX: usize = 65_536;

#[derive(Debug, Default)]
pub(super) struct Fresh {
    sessions: HashMap<String, Entry>,
    /// Ids by age, some of them of sessions that are no longer here.
    order: VecDeque<String>,
}

#[derive(Debug)]
struct Entry {
    info: SessionInfo,
    owner: Caller,
    touched_ms: u64,
}

impl Fresh {
    pub(super) fn insert(&mut self, info: SessionInfo, owner: Caller, now_ms: u64) {
        while self.order.len() >= FRESH_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.sessions.remove(&oldest);
            }
        }
        self.order.push_back(info.id.clone());
        self.sessions.insert(info.id.clone(), Entry { info, owner, touched_ms: now_ms });
    }

    /// The session, when it is its owner who asks and it was touched after `after_ms`.
    pub(super) fn get(&self, caller: &Caller, id: &str, after_ms: u64) -> Option<SessionInfo> {
        let entry = self.sessions.get(id)?;
        (entry.owner == *caller && entry.touched_ms > after_ms).then(|| entry.info.clone())
    }

    /// False for a session that is not here.
    pub(super) fn touch(&mut self, id: &str, now_ms: u64) -> bool {
        match self.sessions.get_mut(id) {
            Some(entry) => {
                entry.touched_ms = now_ms;
                true
            }
            None => false,
        }
    }

    /// It is written down now.
    pub(super) fn forget(&mut self, id: &str) {
        self.sessions.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TenantId;
    use crate::objects::Kind;

    #[test]
    fn the_oldest_make_room() {
        let caller = Caller { tenant: TenantId("a".to_owned()), user: None };
        let info =
            |id: usize| SessionInfo { id: id.to_string(), kind: Kind::Run, space: None, read_only: false };
        let mut fresh = Fresh::default();
        for id in 0..FRESH_MAX + 10 {
            fresh.insert(info(id), caller.clone(), 1);
            if id % 2 == 0 {
                fresh.forget(&id.to_string());
            }
        }
        assert!(fresh.order.len() <= FRESH_MAX && fresh.sessions.len() <= FRESH_MAX);
        assert_eq!(fresh.get(&caller, "9", 0), None);
        assert!(fresh.get(&caller, &(FRESH_MAX + 9).to_string(), 0).is_some());
    }
}
