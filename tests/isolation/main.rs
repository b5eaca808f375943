//! What launcher and kernel enforce, asked from every seat: the guest's, its neighbour's, a taken daemon's, a
//! taken zygote's. Each denial stands next to a control that shows that the probe works.
//!
//! Needs root, Linux with every layer of posture `full`, and the Python environment of `make setup`; without
//! them each test says what is missing and passes.

#![expect(clippy::print_stderr, reason = "a skip prints its reason")]

mod support;

mod crash;
mod daemon_seat;
mod death;
mod exhausted;
mod groups;
mod outside;
mod planted;
mod policy;
mod postures;
mod release;
mod reuse;
mod runtimes;
mod siblings;
mod sockets;
mod space;
mod view;
mod zygote_seat;
