//! Fuzz targets for the `ubtrfs` program: its commands run in this process, from arguments to exit status. The bodies
//! of all other targets are in `ubtrfs_testkit::hostile`.
//!
//! - I1. A command changes nothing on the host except its target. [`Scratch::check`] verifies the files around the
//!   target.
//! - I2. A command ends with a status. A panic, even in a thread of the engine, is a finding.
#![allow(unreachable_pub)]

mod import;
mod scratch;
mod walk;

use std::ffi::OsString;

pub use import::import;
pub use walk::walk;

use scratch::Scratch;

/// Runs a command and returns whether it succeeded.
fn run(args: &[OsString]) -> bool {
    let words: Vec<OsString> = std::iter::once(OsString::from("ubtrfs")).chain(args.iter().cloned()).collect();
    match ubtrfs_cli::run_line(&words) {
        Ok(status) => status == std::process::ExitCode::SUCCESS,
        Err(error) => panic!("{args:?}: {error}"),
    }
}

/// Makes the arguments of a command.
macro_rules! words {
    ($($word:expr),* $(,)?) => { [$(::std::ffi::OsString::from($word)),*] };
}
use words;
