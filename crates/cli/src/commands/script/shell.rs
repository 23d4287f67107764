//! `ubtrfs shell IMAGE`: a prompt for commands on an image.
//!
//! Each command opens the image and closes it, so it is durable when the prompt returns, and other programs can use the
//! image between two commands.

use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Editor};

use super::complete::Completions;
use super::line::{Line, ScriptPlace};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImagePath, ImageUse, lookup, with_image};
use crate::common::{Shown, print_error};
use crate::{Command, finish, parse_or_tell, with_accepted_spellings};

/// Type commands on an image at a prompt, with history and completion
///
/// Lines come from standard input. The exit status is that of the last command. End with exit or Ctrl-D.
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

fn run_lines(place: &mut ScriptPlace) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut line = Vec::new();
    // Standard input is locked only for the line, because a command may read what follows, such as `import -`.
    while std::io::stdin().lock().read_until(b'\n', &mut line).context("cannot read standard input")? > 0 {
        match run_line(place, &std::mem::take(&mut line)) {
            LineOutcome::Exit => break,
            LineOutcome::Ran(ran) => status = ran,
            LineOutcome::Nothing => {}
        }
    }
    Ok(status)
}

fn prompt(place: &mut ScriptPlace) -> anyhow::Result<ExitCode> {
    let config = Config::builder().auto_add_history(true).build();
    let mut editor: Editor<Completions, DefaultHistory> =
        Editor::with_config(config).context("cannot use the terminal")?;
    let mut status = ExitCode::SUCCESS;
    loop {
        editor.set_helper(Some(Completions::new(place.clone())));
        let name = place.image.file_name().unwrap_or(place.image.as_os_str());
        match editor.readline(&format!("{}:{}> ", name.shown(), printable(&place.dir))) {
            Ok(line) => match run_line(place, line.as_bytes()) {
                LineOutcome::Exit => return Ok(status),
                LineOutcome::Ran(ran) => status = ran,
                LineOutcome::Nothing => {}
            },
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
    /// The line ends the shell.
    Exit,
}

fn run_line(place: &mut ScriptPlace, line: &[u8]) -> LineOutcome {
    let ran = match place.parse(line) {
        Ok(Line::Nothing) => return LineOutcome::Nothing,
        Ok(Line::ChangeDir(dir)) => match check_dir(place, &dir) {
            Ok(()) => {
                place.dir = dir;
                ExitCode::SUCCESS
            }
            Err(error) => print_error(&error),
        },
        Ok(Line::Command(words)) if matches!(words.get(1).and_then(|word| word.to_str()), Some("exit" | "quit")) => {
            return LineOutcome::Exit;
        }
        Ok(Line::Command(words)) => match parse_or_tell(&with_accepted_spellings(words)) {
            Ok(cli) if matches!(cli.command, Command::Shell(_)) => {
                print_error(&anyhow::anyhow!("this is a shell already; end it with exit"))
            }
            Ok(cli) => finish(crate::run(cli.command)),
            Err(status) => status,
        },
        Err(error) => print_error(&error),
    };
    LineOutcome::Ran(ran)
}

/// Fails unless the path is a directory of the image.
fn check_dir(place: &ScriptPlace, dir: &[u8]) -> anyhow::Result<()> {
    let at = ImagePath { image: place.image.clone(), path: dir.to_vec() };
    with_image(&place.image, &ImageOptions::default(), ImageUse::Read, |fs| {
        anyhow::ensure!(lookup(fs, &at, true)?.is_dir(), "{at} is not a directory");
        Ok(())
    })
}
