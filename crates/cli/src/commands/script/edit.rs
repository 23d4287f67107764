//! `ubtrfs edit IMAGE SCRIPT`: all commands of a script, or none.
//!
//! Invariants:
//! - E1. Each line is parsed before the image is opened for writing, so a mistake in a line changes nothing.
//! - E2. All changes are in one transaction. If a command fails, or the program ends early, the image keeps the state that
//!   it had before.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_control::reopen;

use super::line::{Line, ScriptPlace};
use crate::commands::offline::held::while_held;
use crate::commands::offline::{ImageOptions, ImageUse, with_shared_image};
use crate::commands::place::find_own;
use crate::common::Shown;
use crate::{Cli, Command, finish, parse_or_tell, with_accepted_spellings};

/// Run the commands of a script on an image: all of them, or none
///
/// If a command fails, the image stays as it was.
#[derive(clap::Args)]
#[command(after_help = super::LINES_HELP)]
pub(crate) struct EditArgs {
    /// The image
    image: PathBuf,
    /// A file with one command in each line; "-" is standard input
    script: PathBuf,
    #[command(flatten)]
    options: ImageOptions,
}

/// A line of the script that names a command.
struct Step {
    /// The line's number, from 1.
    number: usize,
    text: String,
    command: Command,
}

pub(crate) fn run_edit(args: &EditArgs) -> anyhow::Result<ExitCode> {
    let shown = if args.script.as_os_str() == "-" { "standard input".to_owned() } else { args.script.shown() };
    let steps = match steps(args, &read_script(args)?, &shown)? {
        Ok(steps) => steps,
        Err(status) => return Ok(status),
    };
    if steps.is_empty() {
        bail!("{shown} has no command; write one in each line, for example: mkdir :/etc");
    }
    with_shared_image(&args.image, &args.options, ImageUse::Write, |fs| {
        fs.begin_atomic().with_context(|| format!("cannot begin to edit {}", args.image.shown()))?;
        let ran = while_held(&args.image, fs, || {
            steps.into_iter().try_for_each(|Step { number, text, command }| match finish(crate::run(command)) {
                ExitCode::SUCCESS => Ok(()),
                _ => Err(format!("line {number} of {shown} failed: {text}")),
            })
        });
        let failed = match ran {
            Ok(()) => fs.commit_atomic().err().map(|error| format!("the changes cannot be committed: {error}")),
            Err(failed) => Some(failed),
        };
        match failed {
            None => Ok(ExitCode::SUCCESS),
            Some(reason) => {
                fs.abort("the edit failed".to_owned());
                bail!("{reason}; {} is as it was", args.image.shown())
            }
        }
    })
}

fn read_script(args: &EditArgs) -> anyhow::Result<Vec<u8>> {
    let mut script = Vec::new();
    let mut input: Box<dyn Read> = match args.script.as_os_str() == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => {
            let shown = args.script.shown();
            let found = find_own(&args.script)?.with_context(|| format!("the script {shown} does not exist"))?;
            let opened = reopen(&found, &args.script, std::fs::OpenOptions::new().read(true));
            Box::new(opened.with_context(|| format!("cannot open the script {shown}"))?)
        }
    };
    input.by_ref().take(SCRIPT_MAX + 1).read_to_end(&mut script).context("cannot read the script")?;
    if script.len() as u64 > SCRIPT_MAX {
        bail!("the script is longer than 64 MiB; put files beside it, and copy them with cp or import");
    }
    Ok(script)
}

/// Parses the lines (E1). The inner error is an exit status of a line whose usage was printed.
fn steps(args: &EditArgs, script: &[u8], shown: &str) -> anyhow::Result<Result<Vec<Step>, ExitCode>> {
    let mut place = ScriptPlace::new(&args.image);
    let mut steps = Vec::new();
    for (index, line) in script.split(|&byte| byte == b'\n').enumerate() {
        let number = index.saturating_add(1);
        let at = || format!("line {number} of {shown}");
        let words: Vec<OsString> = match place.parse(line).with_context(at)? {
            Line::Nothing => continue,
            Line::ChangeDir(dir) => {
                place.dir = dir;
                continue;
            }
            Line::Command(words) => words,
        };
        let name = words.get(1).map(|word| word.shown()).unwrap_or_default();
        let Cli { command, .. } = match parse_or_tell(&with_accepted_spellings(words)) {
            Ok(cli) => cli,
            Err(status) => {
                crate::common::warn(&format!("{} is not a command line of ubtrfs; nothing was changed", at()));
                return Ok(Err(status));
            }
        };
        if !is_atomic(&command) {
            bail!(
                "{}: '{name}' cannot be part of an edit, only commands on files can, such as cp, import, mkdir, rm, mv, ln, chmod \
                 and chown; nothing was changed",
                at()
            );
        }
        let text = std::ffi::OsStr::from_bytes(line.trim_ascii()).shown();
        steps.push(Step { number, text, command });
    }
    Ok(Ok(steps))
}

/// Whether a command does all its changes in the running transaction.
fn is_atomic(command: &Command) -> bool {
    matches!(
        command,
        Command::Import(_)
            | Command::Ls(_)
            | Command::Cat(_)
            | Command::Stat(_)
            | Command::Cp(_)
            | Command::Mv(_)
            | Command::Rm(_)
            | Command::Mkdir(_)
            | Command::Ln(_)
            | Command::Touch(_)
            | Command::Truncate(_)
            | Command::Chmod(_)
            | Command::Chown(_)
            | Command::Getfattr(_)
            | Command::Setfattr(_)
            | Command::Find(_)
    )
}

/// Limit of a script's length in bytes.
const SCRIPT_MAX: u64 = 64 << 20;
