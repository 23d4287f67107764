//! `ubtrfs shell IMAGE`: a prompt for commands on an image.
//!
//! Each command opens the image and closes it, so it is durable when the prompt returns, and other programs can use the
//! image between two commands. On a terminal, each command is a process, so Ctrl-C ends the command and not the shell.

use std::ffi::OsString;
use std::io::{BufRead, IsTerminal};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anyhow::Context;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{CompletionType, Config, Editor};

use super::complete::Completions;
use super::line::{Line, ScriptPlace};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImagePath, ImageUse, lookup, with_image};
use crate::common::{Shown, print_error, print_out, warn};
use crate::{finish, interrupt, parse_or_tell, with_accepted_spellings};

/// Type commands on an image at a prompt, with history and completion
///
/// Lines come from standard input. The exit status is that of the last command. End with exit or Ctrl-D. Type help for the
/// words of the shell.
#[derive(clap::Args)]
#[command(after_help = super::LINES_HELP)]
pub(crate) struct ShellArgs {
    /// The image
    image: PathBuf,
}

pub(crate) fn run_shell(args: &ShellArgs) -> anyhow::Result<ExitCode> {
    let mut place = ScriptPlace::new(&args.image);
    check_dir(&place, b"/")?;
    match std::io::stdin().is_terminal() {
        true => prompt(&mut place),
        false => run_lines(&mut place),
    }
}

/// How a command of a line is run.
type RunCommand = fn(Vec<OsString>) -> ExitCode;

fn run_lines(place: &mut ScriptPlace) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut line = Vec::new();
    // Standard input is locked only for the line, because a command may read what follows, such as `import -`.
    while std::io::stdin().lock().read_until(b'\n', &mut line).context("cannot read standard input")? > 0 {
        match run_line(place, &std::mem::take(&mut line), run_here) {
            LineOutcome::Exit(wanted) => return Ok(wanted.unwrap_or(status)),
            LineOutcome::Ran(ran) => status = ran,
            LineOutcome::Nothing => {}
        }
    }
    Ok(status)
}

/// The terminal's settings before the first prompt.
static TERMINAL: OnceLock<Termios> = OnceLock::new();

fn restore_terminal() {
    if let Some(before) = TERMINAL.get() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
    }
}

fn prompt(place: &mut ScriptPlace) -> anyhow::Result<ExitCode> {
    if let Ok(before) = tcgetattr(std::io::stdin()) {
        let _ = TERMINAL.set(before);
        interrupt::set_restore(Some(restore_terminal));
    }
    let config = Config::builder().auto_add_history(true).completion_type(CompletionType::List).build();
    let mut editor: Editor<Completions, DefaultHistory> =
        Editor::with_config(config).context("cannot use the terminal")?;
    let mut status = ExitCode::SUCCESS;
    loop {
        editor.set_helper(Some(Completions::new(place.clone())));
        let name = place.image.file_name().unwrap_or(place.image.as_os_str());
        match editor.readline(&format!("{}:{}> ", name.shown(), printable(&place.dir))) {
            // Several lines may have been pasted.
            Ok(text) => {
                for line in text.lines() {
                    match interrupt::while_lent(|| run_line(place, line.as_bytes(), run_process)) {
                        LineOutcome::Exit(wanted) => return Ok(wanted.unwrap_or(status)),
                        LineOutcome::Ran(ran) => status = ran,
                        LineOutcome::Nothing => {}
                    }
                }
            }
            // Ctrl-C drops the line.
            Err(ReadlineError::Interrupted) => {}
            Err(ReadlineError::Eof) => return Ok(status),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        }
    }
}

/// What became of a line.
enum LineOutcome {
    /// There was nothing to do.
    Nothing,
    Ran(ExitCode),
    /// The line ends the shell, with this status or that of the last command.
    Exit(Option<ExitCode>),
}

fn run_line(place: &mut ScriptPlace, line: &[u8], run: RunCommand) -> LineOutcome {
    let words = match place.parse(line) {
        Ok(Line::Nothing) => return LineOutcome::Nothing,
        Ok(Line::ChangeDir(dir)) => {
            return LineOutcome::Ran(match check_dir(place, &dir) {
                Ok(()) => {
                    place.dir = dir;
                    ExitCode::SUCCESS
                }
                Err(error) => print_error(&error),
            });
        }
        Ok(Line::Command(words)) => words,
        Err(error) => return LineOutcome::Ran(print_error(&error)),
    };
    let texts: Vec<&str> = words.iter().skip(1).map(|word| word.to_str().unwrap_or_default()).collect();
    LineOutcome::Ran(match texts.as_slice() {
        ["exit" | "quit"] => return LineOutcome::Exit(None),
        ["exit" | "quit", status] => match status.parse::<u8>() {
            Ok(status) => return LineOutcome::Exit(Some(ExitCode::from(status))),
            Err(_) => print_error(&anyhow::anyhow!("'{}' is no exit status; write a number up to 255", status.shown())),
        },
        ["help"] => printed(&format!("{}\n\n{WORDS_HELP}\n", super::LINES_HELP)),
        ["pwd"] => printed(&format!("{}\n", printable(&place.dir))),
        ["shell", ..] => print_error(&anyhow::anyhow!("this is a shell already; end it with exit")),
        // As in other shells, without a path the current directory is meant.
        ["ls" | "find"] => run(words.iter().cloned().chain([place.path(&place.dir)]).collect()),
        _ => run(words),
    })
}

fn printed(text: &str) -> ExitCode {
    print_out(text).map_or_else(|error| print_error(&error), |()| ExitCode::SUCCESS)
}

/// Runs a command in this process.
fn run_here(words: Vec<OsString>) -> ExitCode {
    match parse_or_tell(&with_accepted_spellings(words)) {
        Ok(cli) => finish(crate::run(cli.command)),
        Err(status) => status,
    }
}

/// Runs a command in a process of its own, which has the terminal.
fn run_process(words: Vec<OsString>) -> ExitCode {
    let program = std::env::current_exe().context("cannot find this program");
    let started = program.and_then(|program| {
        let status = std::process::Command::new(program).args(words.iter().skip(1)).status();
        status.context("cannot start the command")
    });
    match started {
        Ok(status) => match (status.code().and_then(|code| u8::try_from(code).ok()), status.signal()) {
            (Some(code), _) => ExitCode::from(code),
            // The status that other shells give.
            (None, signal) => {
                warn(&format!("the command was ended by signal {}", signal.unwrap_or(0)));
                ExitCode::from(u8::try_from(128 + signal.unwrap_or(0)).unwrap_or(1))
            }
        },
        Err(error) => print_error(&error),
    }
}

/// The help on words that only the shell has.
const WORDS_HELP: &str = "cd [:DIR]   change the directory in the image, in which relative paths begin
pwd         print it
ls, find    without a path: list it
exit [N]    end the shell, with this exit status or that of the last command; so does Ctrl-D
help        print this text; 'COMMAND --help' describes a command, '--help' lists the commands";

/// Fails unless the path is a directory of the image.
pub(super) fn check_dir(place: &ScriptPlace, dir: &[u8]) -> anyhow::Result<()> {
    let at = ImagePath { image: place.image.clone(), path: dir.to_vec() };
    with_image(&place.image, &ImageOptions::default(), ImageUse::Read, |fs| {
        anyhow::ensure!(lookup(fs, &at, true)?.is_dir(), "{at} is not a directory");
        Ok(())
    })
}
