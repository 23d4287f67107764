//! `ubtrfs edit IMAGE SCRIPT`: all commands of a script, or none.
//!
//! Invariants:
//! - E1. Each line is parsed before the image is opened for writing, so a mistake in a line changes nothing.
//! - E2. All changes are in one transaction, so other images are only read. If a command fails, or the program ends early,
//!   the image keeps the state that it had before.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use ubtrfs_control::reopen;

use super::line::{Line, ScriptPlace};
use super::shell::check_dir;
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

/// Takes the number, the text and the command of a line.
type VisitStep<'v> = &'v mut dyn FnMut(usize, &[u8], Command) -> anyhow::Result<()>;

/// Takes the directory that a line changes to.
type VisitDir<'v> = &'v dyn Fn(&ScriptPlace, &[u8]) -> anyhow::Result<()>;

/// Why not all lines were visited.
enum Stop {
    Failed(anyhow::Error),
    /// The usage of a line was printed.
    Usage(ExitCode),
}

impl From<anyhow::Error> for Stop {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

pub(crate) fn run_edit(args: &EditArgs) -> anyhow::Result<ExitCode> {
    let shown = if args.script.as_os_str() == "-" { "standard input".to_owned() } else { args.script.shown() };
    let script = read_script(args)?;
    let mut is_empty = true;
    // A directory may be made by a line before.
    let any_dir: VisitDir<'_> = &|_, _| Ok(());
    let parsed = each_step(args, &script, &shown, any_dir, &mut |_, _, _| {
        is_empty = false;
        Ok(())
    });
    match parsed {
        Ok(()) => {}
        Err(Stop::Failed(error)) => return Err(error),
        Err(Stop::Usage(status)) => return Ok(status),
    }
    if is_empty {
        bail!("{shown} has no command; write one in each line, for example: mkdir :/etc");
    }
    with_shared_image(&args.image, &args.options, ImageUse::Write, |fs| {
        fs.begin_atomic().with_context(|| format!("cannot begin to edit {}", args.image.shown()))?;
        let mut run = |number: usize, line: &[u8], command| match finish(crate::run(command)) {
            ExitCode::SUCCESS => Ok(()),
            _ => bail!("line {number} of {shown} failed: {}", std::ffi::OsStr::from_bytes(line.trim_ascii()).shown()),
        };
        // The lines are parsed again, because their commands would take much more memory than the script.
        let ran = while_held(&args.image, fs, || each_step(args, &script, &shown, &check_dir, &mut run));
        let failed = match ran {
            Ok(()) => fs.commit_atomic().err().map(|error| format!("the changes cannot be committed: {error}")),
            Err(Stop::Failed(error)) => Some(format!("{error:#}")),
            Err(Stop::Usage(_)) => Some(format!("a line of {shown} failed")),
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

/// Parses the lines, and calls `visit` with the number, the text and the command of each that has one.
fn each_step(
    args: &EditArgs,
    script: &[u8],
    shown: &str,
    visit_dir: VisitDir<'_>,
    visit: VisitStep<'_>,
) -> Result<(), Stop> {
    let mut place = ScriptPlace::new(&args.image);
    for (index, line) in script.split(|&byte| byte == b'\n').enumerate() {
        let number = index.saturating_add(1);
        let at = || format!("line {number} of {shown}");
        let words: Vec<OsString> = match place.parse(line).with_context(at)? {
            Line::Nothing => continue,
            Line::ChangeDir(dir) => {
                visit_dir(&place, &dir).with_context(at)?;
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
                // A line that asks for help changes nothing either.
                return Err(Stop::Usage(if status == ExitCode::SUCCESS { ExitCode::FAILURE } else { status }));
            }
        };
        if !is_atomic(&command) {
            return Err(Stop::Failed(anyhow!(
                "{}: '{name}' cannot be part of an edit, only commands on files can, such as cp, import, mkdir, rm, mv, ln, chmod \
                 and chown; nothing was changed",
                at()
            )));
        }
        visit(number, line, command)?;
    }
    Ok(())
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
