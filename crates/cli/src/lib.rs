//! The ubtrfs command line: arguments, printing, exit status. Every command is a module of `commands`.
//!
//! Invariants: I1. An error is one line on stderr, `ubtrfs: what; what to do`, and exit status 1 unless the command
//! documents another status. For wrong arguments, clap's tips and the usage follow in separate lines. Neither user
//! input nor a failed write to stdout causes a panic: only `common` prints, and it returns an error if a result cannot
//! be printed. I2. stdout carries only results. Progress and warnings go to stderr, progress only on a terminal. I3.
//! The program also accepts the command lines with which mount(8) and umount(8) call it for the types `ubtrfs` and
//! `fuse.ubtrfs`: `mount.ubtrfs`, `mount.fuse.ubtrfs`, `umount.fuse.ubtrfs`, and `ubtrfs DEVICE DIR -o ...`. I4. Called
//! by a name of btrfs-progs, the program takes their command lines (`progs`).
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod columns;
mod commands;
mod common;
mod interrupt;
mod job;
mod logging;
mod new_image;
mod progs;
mod sort;
mod suggest;
mod units;

pub use commands::mount::option_list as mount_options;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use clap::{Parser, Subcommand};

use crate::common::Shown;

/// btrfs in user space: make, mount, inspect and fill btrfs filesystems without the kernel's driver.
#[derive(Parser)]
#[command(name = "ubtrfs", version, args_override_self = true)]
struct Cli {
    /// Print the command's result in this format; json is the same as the command's option --json
    #[arg(long, value_name = "FORMAT", value_enum)]
    format: Option<Format>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

/// The commands of the program; each variant has an arm in `run`.
#[derive(Subcommand)]
enum Command {
    Mkfs(Box<commands::mkfs::Args>),
    Mount(commands::mount::Args),
    Umount(commands::umount::Args),
    Sync(commands::sync::Args),
    Stats(commands::stats::Args),
    Top(commands::top::Args),
    Filesystem(commands::filesystem::Args),
    Property(commands::property::Args),
    Subvolume(commands::subvolume::Args),
    Balance(commands::balance::Args),
    Device(commands::device::Args),
    Replace(commands::replace::Args),
    Scrub(commands::scrub::Args),
    Quota(commands::quota::Args),
    Qgroup(commands::qgroup::Args),
    Receive(commands::receive::Args),
    Send(commands::send::Args),
    #[cfg(feature = "remote")]
    Push(commands::remote::push::Args),
    #[cfg(feature = "remote")]
    Pull(commands::remote::pull::Args),
    #[cfg(feature = "remote")]
    Remote(commands::remote::Args),
    #[command(visible_alias = "inspect-internal")]
    Inspect(commands::inspect::Args),
    Check(commands::check::Args),
    Rescue(commands::rescue::Args),
    Tune(commands::tune::Args),
    Import(commands::offline::import::Args),
    Export(commands::offline::export::Args),
    Ls(commands::offline::list::LsArgs),
    Cat(commands::offline::list::CatArgs),
    Stat(commands::offline::list::StatArgs),
    Cp(commands::offline::copy::Args),
    Mv(commands::offline::rename::Args),
    Rm(commands::offline::edit::RmArgs),
    Mkdir(commands::offline::edit::MkdirArgs),
    Ln(commands::offline::link::Args),
    Touch(commands::offline::touch::TouchArgs),
    Truncate(commands::offline::touch::TruncateArgs),
    Chmod(commands::offline::attributes::ChmodArgs),
    Chown(commands::offline::attributes::ChownArgs),
    Getfattr(commands::offline::xattr::XattrGetArgs),
    Setfattr(commands::offline::xattr::XattrSetArgs),
    Find(commands::offline::find::Args),
    Diff(commands::offline::diff::Args),
    Edit(commands::script::EditArgs),
    Shell(commands::script::ShellArgs),
    #[cfg(feature = "remote")]
    #[command(hide = true)]
    ServeObject(commands::object::ServeArgs),
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Mkfs(args) => commands::mkfs::run(*args),
        Command::Mount(args) => commands::mount::run(args),
        Command::Umount(args) => commands::umount::run(args),
        Command::Sync(args) => commands::sync::run(args),
        Command::Stats(args) => commands::stats::run(args),
        Command::Top(args) => commands::top::run(&args),
        Command::Filesystem(args) => commands::filesystem::run(args),
        Command::Property(args) => commands::property::run(args),
        Command::Subvolume(args) => commands::subvolume::run(args),
        Command::Balance(args) => commands::balance::run(args),
        Command::Replace(args) => commands::replace::run(args),
        Command::Scrub(args) => commands::scrub::run(args),
        Command::Device(args) => commands::device::run(args),
        Command::Quota(args) => commands::quota::run(args),
        Command::Qgroup(args) => commands::qgroup::run(args),
        Command::Receive(args) => commands::receive::run(&args),
        Command::Send(args) => commands::send::run(&args),
        #[cfg(feature = "remote")]
        Command::Push(args) => commands::remote::push::run(&args),
        #[cfg(feature = "remote")]
        Command::Pull(args) => commands::remote::pull::run(&args),
        #[cfg(feature = "remote")]
        Command::Remote(args) => commands::remote::run(&args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Check(args) => Ok(commands::check::run(args)),
        Command::Rescue(args) => commands::rescue::run(args),
        Command::Tune(args) => commands::tune::run(args),
        Command::Import(args) => commands::offline::import::run(args),
        Command::Export(args) => commands::offline::export::run(args),
        Command::Ls(args) => commands::offline::list::run_ls(args),
        Command::Cat(args) => commands::offline::list::run_cat(args),
        Command::Stat(args) => commands::offline::list::run_stat(args),
        Command::Cp(args) => commands::offline::copy::run(args),
        Command::Mv(args) => commands::offline::rename::run(args),
        Command::Rm(args) => commands::offline::edit::run_rm(args),
        Command::Mkdir(args) => commands::offline::edit::run_mkdir(args),
        Command::Ln(args) => commands::offline::link::run(args),
        Command::Touch(args) => commands::offline::touch::run_touch(args),
        Command::Truncate(args) => commands::offline::touch::run_truncate(args),
        Command::Chmod(args) => commands::offline::attributes::run_chmod(args),
        Command::Chown(args) => commands::offline::attributes::run_chown(args),
        Command::Getfattr(args) => commands::offline::xattr::run_get(args),
        Command::Setfattr(args) => commands::offline::xattr::run_set(args),
        Command::Find(args) => commands::offline::find::run(args),
        Command::Diff(args) => Ok(commands::offline::diff::run(&args)),
        Command::Edit(args) => commands::script::run_edit(&args),
        Command::Shell(args) => commands::script::run_shell(&args),
        #[cfg(feature = "remote")]
        Command::ServeObject(args) => commands::object::run(&args),
    }
}

/// Runs the program with the arguments of this process, and returns its exit status.
pub fn main() -> ExitCode {
    let args = match progs::translate(std::env::args_os().collect()) {
        progs::Called::Line(args) => args,
        progs::Called::Done(status) => return status,
    };
    let args = match with_format(args) {
        Ok(args) => args,
        Err(error) => return common::print_error(&error),
    };
    let args = commands::mount::as_mount_helper(args, &subcommand_names());
    let args = with_accepted_spellings(args);
    let cli = match parse_or_tell(&args) {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    if !matches!(cli.command, Command::Mount(_))
        && let Err(error) = fix_clock()
    {
        return common::print_error(&error);
    }
    lift_file_size_limit();
    #[cfg(feature = "remote")]
    commands::object::install();
    let copies_much =
        matches!(cli.command, Command::Mkfs(_) | Command::Import(_) | Command::Export(_) | Command::Cp(_));
    // A shell on a terminal starts its commands as processes. Otherwise they may handle signals themselves.
    let has_prompt = matches!(cli.command, Command::Shell(_)) && std::io::stdin().is_terminal();
    if copies_much || has_prompt || matches!(cli.command, Command::Top(_)) {
        interrupt::watch();
    }
    let has_bound = args.iter().any(|arg| arg.as_encoded_bytes().starts_with(b"--memory"));
    if !copies_much || has_bound {
        use_small_pages();
    }
    finish(run(cli.command))
}

/// Replaces spellings that other programs accept by those of this program's parser.
fn with_accepted_spellings(args: Vec<OsString>) -> Vec<OsString> {
    let args = commands::filesystem::with_method(commands::balance::with_long_filters(args));
    commands::offline::find::with_long_options(args)
}

/// Parses a command line. If it is wrong or asks for help, prints that, and returns the exit status.
fn parse_or_tell(args: &[OsString]) -> Result<Cli, ExitCode> {
    parse(args).map_err(|error| {
        let named = named_commands(args);
        let status = common::print_usage(&error, &named, meant(&error, args).as_deref());
        // For wrong arguments, these commands do not exit with status 1, because their status 1 is an answer: a damaged
        // filesystem, or a balance.
        match named.as_str() {
            _ if progs::is_progs() => status,
            "ubtrfs check" if error.use_stderr() => ExitCode::from(commands::check::CANNOT_CHECK),
            "ubtrfs balance status" if error.use_stderr() => ExitCode::from(commands::balance::CANNOT_SHOW),
            _ => status,
        }
    })
}

/// Parses a command line of `ubtrfs`, or of `btrfs` with full names. As in getopt_long(3), `btrfs` takes shortened long
/// options.
fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    use clap::FromArgMatches;
    /// Scripts parse many lines.
    static DEFINITION: LazyLock<Mutex<clap::Command>> =
        LazyLock::new(|| Mutex::new(definition().infer_long_args(progs::is_progs())));
    let mut command = DEFINITION.lock().unwrap_or_else(PoisonError::into_inner);
    command.try_get_matches_from_mut(args).and_then(|matches| Cli::from_arg_matches(&matches))
}

/// The definition of all commands, under the name by which this program was called. Manual pages and completions are
/// made from it.
pub fn definition() -> clap::Command {
    use clap::CommandFactory;
    let name = progs::program();
    let usage = |group, command, usage: &str| {
        let usage = format!("{name} {group} {command} [OPTIONS] {usage}");
        move |sub: clap::Command| sub.mut_subcommand(command, |sub| sub.override_usage(usage))
    };
    Cli::command()
        .name(name)
        .bin_name(name)
        // The last of several operands differs from the others, which clap cannot tell from their number.
        .mut_subcommand("device", usage("device", "add", "<DEVICE>... <PATH|IMAGE>"))
        .mut_subcommand("device", usage("device", "remove", "<DEVICE|DEVID|missing|cancel>... <PATH|IMAGE>"))
}

/// Whether the command that the arguments name has this long option.
fn command_has(args: &[OsString], option: &str) -> bool {
    named_command(args).1.get_arguments().any(|arg| arg.get_long() == Some(option))
}

/// The first line of the help of the command with these names, without the program's.
fn about(names: &[&str]) -> Option<String> {
    let args: Vec<OsString> = std::iter::once("btrfs").chain(names.iter().copied()).map(OsString::from).collect();
    named_command(&args).1.get_about().map(ToString::to_string)
}

/// Runs one command line, for tests in this process. The first argument is the program's name. Unlike [`main`], does
/// not remove temporary files on signals, and does not raise the limit on file sizes.
///
/// # Errors
/// The arguments are wrong.
pub fn run_line(args: &[OsString]) -> Result<ExitCode, clap::Error> {
    Cli::try_parse_from(args).map(|cli| finish(run(cli.command)))
}

fn finish(done: anyhow::Result<ExitCode>) -> ExitCode {
    done.unwrap_or_else(|error| common::print_error(&error))
}

/// Gives images the time of `SOURCE_DATE_EPOCH`, in seconds since 1970, if this variable is set. Servers of mounts have the
/// time of the system.
fn fix_clock() -> anyhow::Result<()> {
    let Some(text) = std::env::var_os("SOURCE_DATE_EPOCH") else { return Ok(()) };
    let parsed = text.to_str().and_then(|text| text.parse::<u64>().ok()).and_then(|sec| i64::try_from(sec).ok());
    let Some(sec) = parsed else {
        anyhow::bail!("SOURCE_DATE_EPOCH is '{}'; set it to seconds since 1970, or unset it", text.shown());
    };
    ubtrfs_format::clock::fix_clock(ubtrfs_format::item::Timespec { sec, nsec: 0 });
    Ok(())
}

/// Raises the limit on file sizes (`ulimit -f`) as far as allowed, because an image is one large file. If a limit
/// remains, a write past the limit fails. SIGXFSZ needs a handler, because the signal would otherwise end the program
/// and lose all changes in memory.
fn lift_file_size_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Fsize);
    if limit.current.is_some() && setrlimit(Resource::Fsize, Rlimit { current: None, maximum: None }).is_err() {
        let _ = setrlimit(Resource::Fsize, Rlimit { current: limit.maximum, maximum: limit.maximum });
    }
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Takes memory in small pages. The allocator asks for huge ones, and a huge page is resident as a whole for a few bytes of
/// it: the server of a mount took three times the memory that it used, and more than `--memory` allows. A command that copies
/// much is faster with huge pages.
fn use_small_pages() {
    // A kernel without huge pages refuses this.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
}

/// Replaces `--format json` before the command by the command's option `--json`, and removes `--format text`. Leaves
/// other formats to the argument parser, which refuses them.
fn with_format(args: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let words: Vec<Option<&str>> = args.iter().skip(1).take(2).map(|arg| arg.to_str()).collect();
    let (format, len) = match words.as_slice() {
        [Some("--format"), Some(format)] => (*format, 2),
        [Some(word), ..] if word.starts_with("--format=") => (&word["--format=".len()..], 1),
        _ => return Ok(args),
    };
    if !matches!(format, "text" | "json") {
        return Ok(args);
    }
    let mut rest: Vec<OsString> = args.iter().take(1).chain(args.iter().skip(1 + len)).cloned().collect();
    if format == "json" {
        let (names, command) = named_command(&rest);
        if !command.get_arguments().any(|arg| arg.get_long() == Some("json")) {
            anyhow::bail!("{} does not print JSON; leave out --format json", names.join(" "));
        }
        if !rest.iter().any(|arg| arg == "--json") {
            rest.insert(names.len(), "--json".into());
        }
    }
    Ok(rest)
}

/// Returns a tip about an unknown command.
fn meant(error: &clap::Error, args: &[OsString]) -> Option<String> {
    use clap::error::{ContextKind, ContextValue};
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    suggest::command_meant(&definition(), &named_command(args).0, word)
}

/// Returns the command that the arguments name, such as `ubtrfs subvolume list`.
fn named_commands(args: &[OsString]) -> String {
    named_command(args).0.join(" ")
}

/// Returns the names of the command that the arguments name, and its definition.
fn named_command(args: &[OsString]) -> (Vec<String>, clap::Command) {
    let mut command = definition();
    let mut names = vec![command.get_name().to_owned()];
    for word in args.iter().skip(1).map_while(|arg| arg.to_str()) {
        let Some(sub) = command.find_subcommand(word).cloned() else { break };
        names.push(sub.get_name().to_owned());
        command = sub;
    }
    (names, command)
}

/// Returns the names of all commands. Any other first argument names a device.
fn subcommand_names() -> Vec<String> {
    let command = definition();
    let mut names = Vec::new();
    for sub in command.get_subcommands() {
        names.push(sub.get_name().to_owned());
        names.extend(sub.get_all_aliases().map(str::to_owned));
    }
    names
}
