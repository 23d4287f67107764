//! `ubtrfs rescue super-recover`: rewrites bad copies of the superblock from a good one. The command is named as in
//! btrfs-progs.
//!
//! I1. Nothing is written unless the filesystem can be opened with the good copy.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use ubtrfs_device::{Access, Device};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_volumes::{SuperCopies, SuperCopy};

use super::offline::open_device;
use super::place::is_same_file;
use crate::common::{Shown, is_confirmed, print_err, print_out};

/// Repair damage that prevents mounting a filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    SuperRecover(SuperRecoverArgs),
}

/// Rewrite bad copies of the superblock from the newest good one
///
/// Refuses if no copy is good, if the filesystem cannot be opened with the newest good copy, and while the image is in
/// use. Changes that fsync made durable since the last commit may be recorded only in the first copy, and are lost if
/// this copy is bad.
#[derive(clap::Args)]
struct SuperRecoverArgs {
    /// The image file or block device; all devices if the filesystem has several
    #[arg(value_name = "DEVICE", required = true)]
    devices: Vec<PathBuf>,
    /// Do not ask for confirmation
    #[arg(short)]
    yes: bool,
    /// List all copies
    #[arg(short)]
    verbose: bool,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::SuperRecover(args) => super_recover(&args),
    }
}

fn super_recover(args: &SuperRecoverArgs) -> anyhow::Result<ExitCode> {
    let mut found = Vec::new();
    for (index, path) in args.devices.iter().enumerate() {
        if args.devices[..index].iter().any(|other| is_same_file(other, path)) {
            bail!("{} is given twice; give each device once", path.shown());
        }
        let device: Arc<dyn Device> = Arc::new(open_device(path, Access::ReadWrite)?);
        let copies = SuperCopies::examine(&*device)?;
        found.push((device, copies));
    }
    if args.verbose {
        print_out(&list(&found))?;
    }
    if found.iter().all(|(_, copies)| copies.bad().next().is_none()) {
        print_out("All superblocks are valid, no need to recover\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    // Open the filesystem with the good copy before writing anything (I1).
    let devices = found.iter().map(|(device, _)| Arc::clone(device)).collect();
    Fs::open(devices, MountOptions { read_only: true, ..MountOptions::default() })
        .and_then(|fs| fs.close())
        .context("the filesystem cannot be opened with the good copy of the superblock; nothing was changed")?;
    if !args.yes && !confirm(&found)? {
        bail!("nothing was changed");
    }
    for (device, copies) in &found {
        copies.recover(&**device)?;
        for copy in copies.bad() {
            print_out(&format!("{}: wrote the superblock at {}\n", device.describe(), copy.offset))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks for confirmation on the terminal.
fn confirm(found: &[(Arc<dyn Device>, SuperCopies)]) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        bail!("cannot ask for confirmation without a terminal; list the copies with -v, and confirm with -y");
    }
    for (device, copies) in found {
        for copy in copies.bad() {
            print_err(&format!("{}: the superblock at {}", device.describe(), state(copy)));
        }
    }
    is_confirmed("Overwrite these superblocks? Their content will be lost. [y/N]")
}

fn list(found: &[(Arc<dyn Device>, SuperCopies)]) -> String {
    let mut text = String::new();
    for (device, copies) in found {
        for copy in &copies.copies {
            text.push_str(&format!("{}: {}\n", device.describe(), state(copy)));
        }
    }
    text
}

fn state(copy: &SuperCopy) -> String {
    match &copy.problem {
        Some(problem) => format!("{}: bad: {problem}", copy.offset),
        None => format!("{}: good", copy.offset),
    }
}
