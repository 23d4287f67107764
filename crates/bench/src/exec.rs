//! `bench exec`: enters a cgroup, moves to a processor, and becomes another program. `compare` starts all programs this
//! way, so that the limits hold from a program's first instruction.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use rustix::thread::CpuSet;

/// Run a program in a cgroup and on a processor
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Directory of the cgroup
    #[arg(long, value_name = "DIR")]
    cgroup: Option<PathBuf>,
    /// Processor to run the program on
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// Executes the given program in place of this program. Returns only on failure.
pub(crate) fn run(args: &Args) -> Result<()> {
    // If the parent is killed, this process must end too.
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    if let Some(cgroup) = &args.cgroup {
        let file = cgroup.join("cgroup.procs");
        std::fs::write(&file, std::process::id().to_string())
            .with_context(|| format!("cannot enter the cgroup {}", cgroup.display()))?;
    }
    if let Some(cpu) = args.cpu {
        let mut set = CpuSet::new();
        set.set(cpu);
        rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("cannot move to processor {cpu}"))?;
    }
    let Some((program, rest)) = args.command.split_first() else { bail!("give a program") };
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
