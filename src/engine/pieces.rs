//! What a running cell or program has produced, on its way to a caller who watches it.
//!
//! The producer never waits, so what nobody takes stays here. It costs by its bytes and not by how often was written:
//! text joins the text before it. What is no text, [`Piece::CHARS_MAX`] and the number of events of a cell bound.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;
use tokio::task::coop::consume_budget;

use crate::engine::{Output, Piece};

/// Text that is told in one piece, in bytes, where it has waited.
const JOINED_BYTES_MAX: usize = 64 * 1024;
/// So many pieces wait in the very order they came. Behind them the text of one stream may pass the other's, as
/// otherwise one that alternates between both would make a piece of each byte.
const IN_ORDER_MAX: usize = 1_000;

/// Takes the pieces.
#[derive(Clone, Debug)]
pub struct Watcher(Arc<Teller>);

/// Hands them out.
#[derive(Debug)]
pub struct Pieces(Arc<Queue>);

/// Nobody takes them any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody watches any more")]
pub struct Unwatched;

/// A queue's one entry; its watchers share it.
#[derive(Debug)]
struct Teller(Arc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    books: Mutex<Books>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Books {
    waiting: VecDeque<Piece>,
    /// One side has gone.
    over: bool,
}

/// Both ends of a new queue.
pub fn pieces() -> (Watcher, Pieces) {
    let queue = Arc::<Queue>::default();
    (Watcher(Arc::new(Teller(Arc::clone(&queue)))), Pieces(queue))
}

impl Watcher {
    pub fn send(&self, piece: Piece) -> Result<(), Unwatched> {
        let queue = &self.0.0;
        let mut books = queue.lock();
        if books.over {
            return Err(Unwatched);
        }
        books.put(piece);
        drop(books);
        queue.news.notify_one();
        Ok(())
    }
}

impl Pieces {
    /// The next one; `None` once there will be none. Dropped before it resolves it has lost nothing.
    pub async fn recv(&mut self) -> Option<Piece> {
        // A queue that is never empty does not keep its reader's thread.
        consume_budget().await;
        loop {
            match self.0.take() {
                Ok(piece) => return piece,
                Err(Empty) => self.0.news.notified().await,
            }
        }
    }

    /// The next one, if it is there.
    pub fn try_recv(&mut self) -> Option<Piece> {
        self.0.lock().waiting.pop_front()
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.news.notify_one();
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let mut books = self.0.lock();
        books.over = true;
        let waiting = std::mem::take(&mut books.waiting);
        drop(books);
        drop(waiting);
    }
}

/// Nothing is there yet.
struct Empty;

impl Queue {
    /// The next one; `None` once there will be none.
    fn take(&self) -> Result<Option<Piece>, Empty> {
        let mut books = self.lock();
        match books.waiting.pop_front() {
            None if !books.over => Err(Empty),
            next => Ok(next),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds a queue of pieces")
    }
}

impl Books {
    fn put(&mut self, piece: Piece) {
        if let Piece::Output { output: Output::Stream { name, text }, .. } = &piece {
            let reach = if self.waiting.len() < IN_ORDER_MAX { 1 } else { 2 };
            for earlier in self.waiting.iter_mut().rev().take(reach) {
                let Piece::Output { output: Output::Stream { name: of, text: before }, .. } = earlier else {
                    break;
                };
                if of == name && before.len() + text.len() <= JOINED_BYTES_MAX {
                    before.push_str(text);
                    return;
                }
            }
        }
        self.waiting.push_back(piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Stream;

    fn text(name: Stream, text: &str) -> Piece {
        Piece::Output { output: Output::Stream { name, text: text.to_owned() }, display_id: None }
    }

    fn taken(mut pieces: Pieces) -> Vec<Piece> {
        std::iter::from_fn(|| pieces.try_recv()).collect()
    }

    #[test]
    fn what_waits_costs_by_its_bytes_and_not_by_how_often_was_written() {
        for (streams, most) in [(&[Stream::Stdout][..], 16), (&[Stream::Stdout, Stream::Stderr], 1_040)] {
            let (watcher, pieces) = pieces();
            for n in 0..1_000_000 {
                watcher.send(text(streams[n % streams.len()], "x")).expect("it is heard");
            }
            let taken = taken(pieces);
            assert!(taken.len() <= most, "{} pieces", taken.len());
            let bytes = |piece: &Piece| match piece {
                Piece::Output { output: Output::Stream { text, .. }, .. } => text.len(),
                other => panic!("{other:?}"),
            };
            assert_eq!(taken.iter().map(bytes).sum::<usize>(), 1_000_000);
        }
    }

    #[test]
    fn text_passes_nothing_that_is_no_text() {
        let (watcher, pieces) = pieces();
        let (out, clear) = (|it| text(Stream::Stdout, it), || Piece::Clear { wait: false });
        for piece in [out("a"), out("b"), clear(), out("c"), text(Stream::Stderr, "e"), out("d")] {
            watcher.send(piece).expect("it is heard");
        }
        assert_eq!(taken(pieces), [out("ab"), clear(), out("c"), text(Stream::Stderr, "e"), out("d")]);
    }

    #[tokio::test]
    async fn each_side_hears_that_the_other_has_gone() {
        let (watcher, mut heard) = pieces();
        let second = watcher.clone();
        watcher.send(text(Stream::Stdout, "last")).expect("it is heard");
        drop(watcher);
        assert!(heard.recv().await.is_some());
        let end = tokio::spawn(async move { heard.recv().await });
        tokio::task::yield_now().await;
        drop(second);
        assert_eq!(end.await.expect("no panic"), None);
        let (watcher, heard) = pieces();
        drop(heard);
        assert_eq!(watcher.send(Piece::Clear { wait: true }), Err(Unwatched));
    }
}
