//! Fuzz targets for the `ubtrfs` program: its commands run in this process, from arguments to exit status.
//!
//! The program is not a library, so this crate includes its sources by path. The bodies of all other targets are in
//! `ubtrfs_testkit::hostile`.
//!
//! - I1. A command changes nothing on the host except its target. [`Scratch::check`] verifies the files around the
//!   target.
//! - I2. A command ends with a status. A panic, even in a thread of the engine, is a finding.
#![allow(dead_code, unreachable_pub)]

#[path = "../../crates/cli/src/common.rs"]
mod common;
#[path = "../../crates/cli/src/host_file.rs"]
mod host_file;
#[path = "../../crates/cli/src/interrupt.rs"]
mod interrupt;
#[path = "../../crates/cli/src/new_image.rs"]
mod new_image;
#[path = "../../crates/cli/src/commands"]
mod commands {
    pub(crate) mod offline;
}
mod import;
mod scratch;
mod walk;

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use commands::offline::{copy, edit, export, import as import_command, list};

pub use import::import;
pub use walk::walk;

use scratch::Scratch;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Import(import_command::Args),
    Export(export::Args),
    Ls(list::LsArgs),
    Cat(list::CatArgs),
    Stat(list::StatArgs),
    Cp(copy::Args),
    Rm(edit::RmArgs),
}

/// Runs a command and returns whether it succeeded.
fn run(args: &[OsString]) -> bool {
    let words = std::iter::once(OsString::from("ubtrfs")).chain(args.iter().cloned());
    let command = match Cli::try_parse_from(words) {
        Ok(cli) => cli.command,
        Err(error) => panic!("{args:?}: {error}"),
    };
    let done = match command {
        Command::Import(args) => import_command::run(args),
        Command::Export(args) => export::run(args),
        Command::Ls(args) => list::run_ls(args),
        Command::Cat(args) => list::run_cat(args),
        Command::Stat(args) => list::run_stat(args),
        Command::Cp(args) => copy::run(args),
        Command::Rm(args) => edit::run_rm(args),
    };
    match done {
        Ok(status) => status == std::process::ExitCode::SUCCESS,
        Err(error) => {
            common::print_error(&error);
            false
        }
    }
}

/// Makes the arguments of a command.
macro_rules! words {
    ($($word:expr),* $(,)?) => { [$(::std::ffi::OsString::from($word)),*] };
}
use words;
