//! The client against a server in this process, which keeps the rules or breaks them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_server;
mod hostile;
mod loss;
mod requests;
mod server;
mod tls;
