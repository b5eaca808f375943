//! What a client hears of a run before its end: that it goes on, when it gave a token for that, and what it prints, when
//! it asked for log messages.
#![forbid(unsafe_code)]
#![expect(
    deprecated,
    reason = "log messages are on their way out of the protocol, and clients still ask for them"
)]

use std::collections::VecDeque;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{
    LoggingLevel, LoggingMessageNotification, LoggingMessageNotificationParam, ProgressNotification,
    ProgressNotificationParam, ProgressToken, ServerNotification,
};
use rmcp::service::{Peer, RequestContext};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::engine::{Output, Piece, Stream};

/// Between two words that a run goes on.
const PROGRESS_EVERY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 3 });
/// For how long output collects before it is told.
const OUTPUT_EVERY: Duration = Duration::from_millis(250);
/// Of output in one message.
const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// Notifications on their way to a client; what a slow one does not take waits here, where it grows together.
const ON_THEIR_WAY_MAX: usize = 8;
/// How long the last of them may hold back the result.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// One client's ear.
pub(super) struct Teller {
    sender: mpsc::Sender<ServerNotification>,
    telling: JoinHandle<()>,
    token: Option<ProgressToken>,
    /// The least that it wants to hear.
    level: Option<LoggingLevel>,
    began: Instant,
    total: Duration,
    told: Instant,
    characters: u64,
    output: VecDeque<(Stream, String)>,
}

impl Teller {
    /// `None` when the client asked for nothing. `total` is the most that the run may take.
    pub(super) fn new(
        context: &RequestContext<RoleServer>,
        level: Option<LoggingLevel>,
        total: Duration,
    ) -> Option<Teller> {
        let token = context.meta.get_progress_token();
        if token.is_none() && level.is_none() {
            return None;
        }
        let (sender, receiver) = mpsc::channel(ON_THEIR_WAY_MAX);
        let telling = tokio::spawn(tell(context.peer.clone(), receiver));
        let (began, told) = (Instant::now(), Instant::now());
        Some(Teller {
            sender,
            telling,
            token,
            level,
            began,
            total,
            told,
            characters: 0,
            output: VecDeque::new(),
        })
    }

    /// When there may be something to tell.
    pub(super) async fn due(&self) {
        let pause = if self.output.is_empty() { PROGRESS_EVERY } else { OUTPUT_EVERY };
        tokio::time::sleep(pause).await;
    }

    pub(super) fn take(&mut self, piece: Piece) {
        let Piece::Output { output: Output::Stream { name, text }, .. } = piece else { return };
        self.characters += text.chars().count() as u64;
        if self.level.is_none_or(|least| rank(level_of(name)) < rank(least)) {
            return;
        }
        match self.output.back_mut() {
            Some((stream, waiting)) if *stream == name && waiting.len() < MESSAGE_BYTES_MAX => {
                waiting.push_str(&text);
            }
            _ => self.output.push_back((name, text)),
        }
    }

    /// Tells what can be told without waiting.
    pub(super) fn tell(&mut self) {
        while let Some((stream, text)) = self.output.pop_front() {
            let message = log_message(stream, &text);
            if self.sender.try_send(message).is_err() {
                self.output.push_front((stream, text));
                break;
            }
        }
        if self.told.elapsed() >= PROGRESS_EVERY && self.token.is_some() {
            self.told = Instant::now();
            // One that is lost is followed by another.
            let _ = self.sender.try_send(self.progress());
        }
    }

    /// Tells the rest before the result comes.
    pub(super) async fn finish(mut self) {
        let rest = async {
            for (stream, text) in self.output.drain(..) {
                if self.sender.send(log_message(stream, &text)).await.is_err() {
                    return;
                }
            }
            drop(self.sender);
            // It ends with the last one.
            let _ = (&mut self.telling).await;
        };
        if tokio::time::timeout(FLUSH_MAX, rest).await.is_err() {
            tracing::debug!("a client does not take what it asked to be told");
        }
    }

    fn progress(&self) -> ServerNotification {
        let seconds = self.began.elapsed().as_secs_f64();
        let token = self.token.clone().expect("there is one where progress is told");
        let message = format!("running for {seconds:.0} s, {} characters of output", self.characters);
        let progress = ProgressNotificationParam::new(token, seconds)
            .with_total(self.total.as_secs_f64())
            .with_message(message);
        ServerNotification::ProgressNotification(ProgressNotification::new(progress))
    }
}

async fn tell(peer: Peer<RoleServer>, mut notifications: mpsc::Receiver<ServerNotification>) {
    while let Some(notification) = notifications.recv().await {
        if peer.send_notification(notification).await.is_err() {
            return;
        }
    }
}

fn log_message(stream: Stream, text: &str) -> ServerNotification {
    let logger = if stream == Stream::Stdout { "stdout" } else { "stderr" };
    let data = Value::String(text.to_owned());
    let message = LoggingMessageNotificationParam::new(level_of(stream), data).with_logger(logger);
    ServerNotification::LoggingMessageNotification(LoggingMessageNotification::new(message))
}

fn level_of(stream: Stream) -> LoggingLevel {
    match stream {
        Stream::Stdout => LoggingLevel::Info,
        Stream::Stderr => LoggingLevel::Warning,
    }
}

/// Levels in the order of how bad it is.
fn rank(level: LoggingLevel) -> u8 {
    level as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_in_order() {
        let levels = [
            LoggingLevel::Debug,
            LoggingLevel::Info,
            LoggingLevel::Notice,
            LoggingLevel::Warning,
            LoggingLevel::Error,
            LoggingLevel::Critical,
            LoggingLevel::Alert,
            LoggingLevel::Emergency,
        ];
        assert!(levels.is_sorted_by_key(|level| rank(*level)));
        assert!(rank(level_of(Stream::Stderr)) > rank(level_of(Stream::Stdout)));
    }
}
