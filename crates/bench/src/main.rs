//! `bench`: runs workloads on the engine, on mounts and on Linux's btrfs, and compares them.
//!
//! | module      | what                                                            |
//! |-------------|-----------------------------------------------------------------|
//! | `target`    | a workload's operations, in this process or by system calls     |
//! | `workload`  | the workloads, each written once                                |
//! | `run`       | one workload on one target                                      |
//! | `compare`   | workloads on several filesystems in turn, medians and ratios    |
//! | `null_server` | a FUSE server that does nothing                               |
//! | `exec`, `cgroup` | the processor and memory limit of programs                 |
//! | `limits`    | what memory, checksums and the disk allow                       |
//! | `record`    | latencies, results                                              |
//! | `cpu`       | processor time                                                  |
//! | `tarball`   | a synthetic source tree as an archive                           |
//! | `machine`   | programs, caches, rights                                        |
#![forbid(unsafe_code)]

mod cgroup;
mod compare;
mod cpu;
mod exec;
mod limits;
mod machine;
mod null_server;
mod record;
mod rng;
mod run;
mod sizes;
mod tarball;
mod target;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The allocator of the program `ubtrfs`, so that the engine is as fast in `bench` as in `ubtrfs`.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measure btrfs engines: ubtrfs in its own process and mounted, Linux's btrfs, and a FUSE server that does nothing.
#[derive(Parser)]
#[command(name = "bench", version, disable_help_subcommand = true)]
struct BenchCli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Args),
    Compare(compare::Args),
    Limits(limits::Args),
    NullServer(null_server::Args),
    #[command(hide = true)]
    Exec(exec::Args),
}

fn main() -> ExitCode {
    let done = match BenchCli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Limits(args) => limits::run(&args),
        Command::NullServer(args) => null_server::run(&args),
        Command::Exec(args) => exec::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {}", format!("{error:#}").replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}
