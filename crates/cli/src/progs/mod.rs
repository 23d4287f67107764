//! The names of btrfs-progs: as `btrfs`, `mkfs.btrfs` and others, this program takes their command lines.
//!
//! | name                          | what it does                                       |
//! |-------------------------------|----------------------------------------------------|
//! | `btrfs`                       | the commands of btrfs-progs (`grammar`)            |
//! | `btrfsck`                     | `btrfs check`                                      |
//! | `mkfs.btrfs`, `mkfs.ubtrfs`   | `mkfs`                                             |
//! | `fsck.btrfs`, `fsck.ubtrfs`   | nothing, as that of btrfs-progs                    |
//! | `btrfstune`                   | `tune`                                             |
//! | `btrfs-find-root` and others  | refused: this program does not have them |
//!
//! The names of mount(8)'s helpers are in `commands/mount/helper.rs`.
//!
//! I1. Each command has one implementation; only the grammar, the beginning of messages and some exit statuses differ.
//! I2. `btrfs` on a path of Linux's own btrfs runs the `btrfs` that serves it (`linux`).

mod grammar;
mod linux;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use ubtrfs_control::CommandFailure;

use crate::common::{Shown, print_err, print_error, print_out};
use grammar::{CommandLine, Globals};

/// The version of btrfs-progs whose commands and texts `btrfs` has.
pub(crate) const VERSION: &str = "6.2";

/// Exit status for unknown options before the command, as in btrfs-progs.
const UNKNOWN_GLOBAL: u8 = 129;

/// The meaning of a command line.
pub(crate) enum Called {
    /// This command line of `ubtrfs`.
    Line(Vec<OsString>),
    /// Everything is done.
    Done(ExitCode),
}

/// Programs of btrfs-progs that this program does not have.
const ABSENT: &[&str] = &["btrfs-find-root", "btrfs-convert", "btrfs-image", "btrfs-map-logical", "btrfs-select-super"];

static NAME: OnceLock<&'static str> = OnceLock::new();
/// The arguments of `btrfs`.
static ARGS: OnceLock<Vec<OsString>> = OnceLock::new();
static QUIET: AtomicBool = AtomicBool::new(false);

/// Commands without an option --quiet that the option before the command makes quiet.
const QUIETED: &[&[&str]] =
    &[&["subvolume", "create"], &["subvolume", "delete"], &["subvolume", "list"], &["subvolume", "snapshot"]];

/// The name in usage and help: `ubtrfs`, or the program of btrfs-progs by whose name this program was called.
pub(crate) fn program() -> &'static str {
    NAME.get().copied().unwrap_or("ubtrfs")
}

/// Whether this program was called by a name of btrfs-progs, so that messages and statuses are those of btrfs-progs.
pub(crate) fn is_progs() -> bool {
    NAME.get().is_some()
}

/// The text of btrfs-progs for a call that failed for one of these reasons: its words for the call, and the error number. `None`
/// for other reasons, of which this program says more, and if this program was called by its own name.
pub(crate) fn failed_call(
    failure: &CommandFailure,
    reasons: &[Errno],
    call: impl FnOnce() -> String,
) -> Option<anyhow::Error> {
    let is_known = is_progs() && reasons.contains(&failure.errno());
    is_known.then(|| anyhow::anyhow!("{}: {}", call(), std::io::Error::from_raw_os_error(failure.errno)))
}

/// Whether `btrfs -q` was given before a command that then prints only errors.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// What Linux's `btrfs` prints for the command line of this process, and its status. `None` if it is not installed.
pub(crate) fn linux_output() -> anyhow::Result<Option<(String, ExitCode)>> {
    linux::output(ARGS.get().map_or(&[][..], Vec::as_slice))
}

/// Translates a command line by the program's name.
pub(crate) fn translate(args: Vec<OsString>) -> Called {
    let name = args.first().map(Path::new).and_then(Path::file_name).and_then(OsStr::to_str).unwrap_or_default();
    let rest = args.get(1..).unwrap_or_default();
    let called_as = |name| {
        let _ = NAME.set(name);
    };
    match name {
        "btrfs" => {
            called_as("btrfs");
            btrfs(rest)
        }
        "btrfsck" => {
            called_as("btrfs");
            Called::Line(words(&["btrfs", "check"], rest))
        }
        "mkfs.btrfs" | "mkfs.ubtrfs" => {
            called_as("mkfs.btrfs");
            if rest.iter().any(|arg| arg == "-V" || arg == "--version") {
                return done(print_out(&format!("mkfs.btrfs, part of btrfs-progs v{VERSION}\n")));
            }
            Called::Line(words(&["mkfs.btrfs", "mkfs"], rest))
        }
        "btrfstune" => {
            called_as("btrfstune");
            Called::Line(words(&["btrfstune", "tune"], rest))
        }
        "fsck.btrfs" | "fsck.ubtrfs" => Called::Done(fsck(name, rest)),
        _ => match ABSENT.iter().find(|absent| **absent == name) {
            Some(absent) => {
                print_err(&format!("ERROR: {absent}: ubtrfs does not have this program"));
                Called::Done(ExitCode::FAILURE)
            }
            None => Called::Line(args),
        },
    }
}

/// The words of a command and its arguments.
fn words(names: &[&str], rest: &[OsString]) -> Vec<OsString> {
    names.iter().map(OsString::from).chain(rest.iter().cloned()).collect()
}

fn done(printed: anyhow::Result<()>) -> Called {
    Called::Done(printed.map_or_else(|error| print_error(&error), |()| ExitCode::SUCCESS))
}

fn failed(error: anyhow::Error) -> Called {
    Called::Done(print_error(&error))
}

/// The obsolete `btrfs filesystem balance`: commands of balances, or a path for a full balance.
fn balance(rest: &[OsString]) -> Called {
    let is_path = rest.first().is_some_and(|word| Path::new(word).exists());
    let names: &[&str] = if is_path { &["balance", "start", "--full-balance"] } else { &["balance"] };
    btrfs(&words(names, rest))
}

fn wrong(message: &str) -> Called {
    print_err(message);
    Called::Done(ExitCode::FAILURE)
}

fn btrfs(args: &[OsString]) -> Called {
    let _ = ARGS.set(args.to_vec());
    let line = match grammar::parse(args) {
        Ok(line) => line,
        Err(mistake) => {
            print_err(&mistake);
            let is_unknown = mistake.starts_with("Unknown global option");
            return Called::Done(if is_unknown { ExitCode::from(UNKNOWN_GLOBAL) } else { ExitCode::FAILURE });
        }
    };
    let CommandLine { globals, names, rest } = line;
    if let Some(error) = linux::run_instead(&rest, args) {
        return Called::Done(print_error(&error));
    }
    let is_help = globals.help || rest.first().is_some_and(|word| word == "--help");
    match names.as_slice() {
        _ if globals.version => return done(print_out(&version())),
        ["version"] => return done(print_out(&version())),
        ["help"] => return done(print_out(&overview())),
        [] if globals.help => return done(print_out(&overview())),
        // As in btrfs-progs, a missing command is answered by the usage on stdout, and by a status.
        [] => return print_out(&overview()).map_or_else(failed, |()| Called::Done(ExitCode::FAILURE)),
        group if grammar::is_group(group) && !is_help => {
            return print_out(&grammar::usage(group)).map_or_else(failed, |()| Called::Done(ExitCode::FAILURE));
        }
        ["filesystem", "balance"] => return balance(&rest),
        group if grammar::is_group(group) => return done(print_out(&grammar::usage(group))),
        command => {
            if let Some(reason) = grammar::absent(command) {
                return wrong(&format!("ERROR: btrfs {}: not in ubtrfs: {reason}", command.join(" ")));
            }
        }
    }
    match with_globals(&globals, &names, rest) {
        Ok(line) => Called::Line(line),
        Err(message) => wrong(&message),
    }
}

/// Makes the command line of `ubtrfs`. Options before the command become options of the command, if it has them.
fn with_globals(globals: &Globals, names: &[&str], rest: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let mut line = words(&["btrfs"], &[]);
    line.extend(names.iter().map(OsString::from));
    let has = |option: &str| crate::command_has(&line, option);
    let mut options: Vec<OsString> = Vec::new();
    match globals.format.as_deref() {
        None | Some("text") => {}
        Some("json") if has("json") => options.push("--json".into()),
        Some("json") => return Err("ERROR: output format json is unsupported for this command".to_owned()),
        Some(format) => {
            return Err(format!(
                "error: invalid output format \"{}\"\n\nOptions for --format are: text, json",
                format.shown()
            ));
        }
    }
    if globals.help {
        options.push("--help".into());
    }
    if globals.quiet && QUIETED.contains(&names) {
        QUIET.store(true, Ordering::Relaxed);
    } else if globals.quiet && has("quiet") {
        options.push("--quiet".into());
    }
    if globals.verbose > 0 && has("verbose") {
        options.push("--verbose".into());
    }
    Ok(line.into_iter().chain(options).chain(rest).collect())
}

/// The version in the form that tools parse, and that of this program.
fn version() -> String {
    format!("btrfs-progs v{VERSION}\nubtrfs {}\n", env!("CARGO_PKG_VERSION"))
}

/// The commands of `btrfs`.
fn overview() -> String {
    format!(
        "usage: btrfs [global] <group> [<group>...] <command> [<args>]\n\n\
         Global options:\n  \
         --format <format> if supported, print subcommand output in that format (text, json)\n  \
         -v|--verbose      increase verbosity of the subcommand\n  \
         -q|--quiet        print only errors\n  \
         --log <level>     set log level (default, info, verbose, debug, quiet)\n\n\
         Options for the main command only:\n  \
         --help            print condensed help for all subcommands\n  \
         --version         print version string\n\n{}\n\
         Use --help as an argument for information on a specific group or command.\n\
         This is ubtrfs {}, btrfs in user space.\n",
        grammar::overview(),
        env!("CARGO_PKG_VERSION")
    )
}

/// The check at boot does nothing, because a filesystem needs none after a crash.
fn fsck(name: &str, args: &[OsString]) -> ExitCode {
    let is_option = |arg: &&OsString| arg.as_encoded_bytes().starts_with(b"-");
    let is_automatic = args.iter().filter(is_option).any(|arg| {
        let letters = arg.as_encoded_bytes();
        letters.iter().any(|letter| b"aApy".contains(letter)) && !letters.starts_with(b"--")
    });
    if let Some(device) = args.iter().rfind(|arg| !is_option(arg))
        && let Err(error) = std::fs::metadata(device)
    {
        print_err(&format!("{name}: {} cannot be read: {error}", device.shown()));
        return ExitCode::from(NO_DEVICE);
    }
    if is_automatic || args.iter().any(|arg| arg == "--help") {
        return ExitCode::SUCCESS;
    }
    print_out("To check a filesystem, use: btrfs check DEVICE\n")
        .map_or_else(|error| print_error(&error), |()| ExitCode::SUCCESS)
}

/// The status of fsck(8) for an operational error.
const NO_DEVICE: u8 = 8;
