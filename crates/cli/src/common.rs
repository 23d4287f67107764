//! Functions that all commands share: printing to stdout and stderr, one-line errors, sizes as btrfs-progs reads and
//! prints them, progress on terminals.
//!
//! If a result cannot be written to stdout, the command fails ([`Stdout`]). The error is returned to `main` like any
//! other error, so that an open image is closed. If the reader of a pipe went away, the program ends quietly with the
//! status of SIGPIPE.

use std::ffi::OsStr;
use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context;
use rustix::io::Errno;
use serde_json::Value;
use ubtrfs_format::print::{escaped, escaped_line, json_lines};

use crate::commands::background;
use crate::logging;
use crate::progs::{is_progs, is_quiet};

/// Parses a size as btrfs-progs does: digits with an optional suffix of K M G T P E (powers of 1024, any case),
/// optionally followed by `iB` or `B`. A suffix may follow a fraction: `1.5G`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let wrong = || format!("'{text}' is not a size; write a number and K, M, G, T, P or E");
    let too_large = || format!("'{text}' is larger than any device; give less than 8E");
    let number_len = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_len);
    let suffix = suffix.to_ascii_lowercase();
    let unit = match suffix.as_str() {
        "ib" => return Err(wrong()),
        other => other.strip_suffix("ib").or_else(|| other.strip_suffix('b')).unwrap_or(other),
    };
    let shift = match unit {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "e" => 60,
        _ => return Err(wrong()),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if shift > 0 && (1..=18).contains(&fraction.len()) => (whole, fraction),
        Some(_) => return Err(wrong()),
        None => (number, ""),
    };
    if whole.is_empty() || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let parts: u128 = [whole, fraction].concat().parse().map_err(|_| too_large())?;
    // The fraction has at most 18 digits, so the power of ten fits into a `u128`.
    let scale = 10u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let bytes = parts.checked_mul(1 << shift).ok_or_else(too_large)? / scale;
    // The limit is the largest file offset on Linux.
    i64::try_from(bytes).ok().and_then(|bytes| u64::try_from(bytes).ok()).ok_or_else(too_large)
}

/// Parses the memory limit of a filesystem.
pub(crate) fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes < MEMORY_MIN {
        return Err(format!("{text} is too little memory; give at least {}M", MEMORY_MIN >> 20));
    }
    Ok(bytes)
}

/// The smallest memory limit with which all parts of the budget work.
const MEMORY_MIN: u64 = 16 << 20;

/// A number with the word for what it counts, for one or for several.
pub(crate) fn counted(nr: u64, one: &str, several: &str) -> String {
    format!("{nr} {}", if nr == 1 { one } else { several })
}

/// Formats a size as btrfs-progs does, such as `1.60GiB`.
pub(crate) fn format_size(bytes: u64) -> String {
    crate::units::Units::default().format(bytes)
}

/// Prints an error as one line on stderr, even if its text has line breaks, and returns exit status 1 (I1 of the
/// crate). If the error means that the reader of standard output went away, prints nothing and returns [`NO_READER`].
pub(crate) fn print_error(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(NO_READER);
    }
    print_err(&error_line(error));
    ExitCode::FAILURE
}

/// Formats an error as `ubtrfs: outer: inner: ...` in one line.
pub(crate) fn error_line(error: &anyhow::Error) -> String {
    format!("{}{}", if is_progs() { "ERROR: " } else { "ubtrfs: " }, error_text(error))
}

/// Formats an error as `outer: inner: ...` in one line.
pub(crate) fn error_text(error: &anyhow::Error) -> String {
    let mut line = String::new();
    let mut previous = String::new();
    for (index, cause) in error.chain().enumerate() {
        let text = match has_server_ended(cause) {
            true => "that mount's server has ended; unmount it with: ubtrfs umount".to_owned(),
            false => without_numbers(&cause.to_string()).split_whitespace().collect::<Vec<_>>().join(" "),
        };
        // Some error types include their source in their text, so skip a source that would be repeated.
        if index > 0 && previous.contains(&text) {
            continue;
        }
        if index > 0 {
            line.push_str(": ");
        }
        line.push_str(&text);
        previous = text;
    }
    if !is_progs() {
        line.push_str(remedy(&line));
    }
    line
}

/// What to do after an error of the engine to which nobody has added it.
fn remedy(line: &str) -> &'static str {
    if line.ends_with("no space left") {
        "; remove files, or make the filesystem larger: ubtrfs filesystem resize"
    } else if line.ends_with("disk quota exceeded") {
        "; remove files, or raise the limit that 'ubtrfs qgroup show -r' shows: ubtrfs qgroup limit"
    } else if line.ends_with(" is not a valid user and group") {
        "; copy it without -p, or with --owner"
    } else if line.contains("data sector: checksum is ") {
        "; repair it from another copy: ubtrfs scrub start, or read it as it is: -o ro,rescue=ignoredatacsums"
    } else {
        ""
    }
}

/// Whether a call failed because the path is in a FUSE mount whose server has ended.
fn has_server_ended(cause: &(dyn std::error::Error + 'static)) -> bool {
    let errno = cause.downcast_ref::<Errno>().copied();
    let io = || cause.downcast_ref::<io::Error>()?.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno.or_else(io), Some(Errno::NOTCONN | Errno::CONNABORTED))
}

/// Removes ` (os error 5)` and the like, because the words before it suffice.
fn without_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(" (os error ") {
        let Some((_, behind)) = after.split_once(')').filter(|(number, _)| number.parse::<i32>().is_ok()) else {
            break;
        };
        out.push_str(before);
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// The text of a path or another string of the system, escaped for a terminal. `Path::display` is not used, because it
/// passes control characters on and loses bytes that are not UTF-8.
pub(crate) trait Shown {
    fn shown(&self) -> String;
}

impl<T: AsRef<OsStr> + ?Sized> Shown for T {
    fn shown(&self) -> String {
        escaped(self.as_ref().as_encoded_bytes())
    }
}

/// Prints one line on stderr about a problem that does not stop the command.
pub(crate) fn warn(text: &str) {
    print_err(&format!("{}{text}", if is_progs() { "WARNING: " } else { "ubtrfs: " }));
}

/// Calls `work` for each operand. As in coreutils, a failure does not stop the work on other operands, but makes the
/// exit status 1. Only if the reader of standard output went away, the remaining operands are skipped.
pub(crate) fn each<T>(
    operands: impl IntoIterator<Item = T>,
    mut work: impl FnMut(T) -> anyhow::Result<()>,
) -> ExitCode {
    let mut status = ExitCode::SUCCESS;
    for operand in operands {
        if let Err(error) = work(operand) {
            status = print_error(&error);
            if is_broken_pipe(&error) {
                break;
            }
        }
    }
    status
}

/// The current user and group, which become the owners of new files.
pub(crate) fn calling_user() -> (u32, u32) {
    if rustix::process::geteuid().is_root() {
        return (0, 0);
    }
    (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw())
}

/// Prints lines on stderr; in the background, sends them to syslog. Control characters are escaped, because messages of
/// other crates and of the system may hold them. Errors are ignored, because there is no other place to report them.
pub(crate) fn print_err(lines: &str) {
    if let Some(work) = background::work() {
        return lines.lines().for_each(|line| logging::tell_syslog(work, line));
    }
    let lines: Vec<String> = lines.split('\n').map(|line| escaped_line(line.as_bytes())).collect();
    let _ = writeln!(std::io::stderr().lock(), "{}", lines.join("\n"));
}

/// Asks a question on stderr, and reads the answer from stdin. Everything but `y` and `yes` means no.
pub(crate) fn is_confirmed(question: &str) -> anyhow::Result<bool> {
    print_err(question);
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).context("cannot read the answer")?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// Prints a message of clap. `--help` and `--version` are printed unchanged; an error is printed with its tips, the
/// usage, and a hint to the help. `tip` takes the place of clap's tips about unknown commands, which are guesses.
pub(crate) fn print_usage(error: &clap::Error, commands: &str, tip: Option<&str>) -> ExitCode {
    use clap::error::{ContextKind, ErrorKind};
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match print_clap(error) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => print_error(&error),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::FAILURE
        }
        _ => {
            let mut text = error.to_string();
            if let Some(source) = std::error::Error::source(error)
                && let Some(number) = source.downcast_ref::<std::num::ParseIntError>()
            {
                text = text.replace(&source.to_string(), number_problem(number));
            }
            let mut lines: Vec<&str> = Vec::new();
            for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty()) {
                // Leave out clap's tip on passing an option as a value, because no command takes such a value.
                let misleads =
                    line.trim_start().starts_with("tip: to pass '") && error.get(ContextKind::InvalidArg).is_some();
                let guesses = line.trim_start().starts_with("tip: ") && line.contains(" similar subcommand");
                if !misleads && !guesses && !line.starts_with("For more information") {
                    lines.push(line);
                }
            }
            let tip = tip.map(|tip| format!("  tip: {tip}"));
            if let Some(tip) = &tip {
                lines.insert(lines.len().min(1), tip);
            }
            let what = with_own_name(&lines.join("\n"));
            let commands = &*with_own_name(commands);
            let what = what.strip_prefix("error: ").unwrap_or(&what);
            let begin = if is_progs() { commands } else { "ubtrfs" };
            print_err(&format!("{begin}: {what}\nFor more, see: {commands} --help"));
            ExitCode::FAILURE
        }
    }
}

/// Says why an argument is no number.
fn number_problem(error: &std::num::ParseIntError) -> &'static str {
    use std::num::IntErrorKind;
    match error.kind() {
        IntErrorKind::Empty => "a number is missing",
        IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => "the number is too large",
        _ => "this is not a whole number",
    }
}

/// Prints help, in colors if stdout is a terminal.
fn print_clap(error: &clap::Error) -> anyhow::Result<()> {
    if stdout().is_terminal() && !is_progs() {
        return error.print().and_then(|()| io::stdout().flush()).context(OUTPUT_LOST);
    }
    print_out(&with_own_name(&error.render().to_string()))
}

/// Turns clap's `mkfs.btrfs mkfs` and `btrfstune tune` into the name of the program.
fn with_own_name(text: &str) -> String {
    text.replace("mkfs.btrfs mkfs", "mkfs.btrfs").replace("btrfstune tune", "btrfstune")
}

/// Makes a progress bar over bytes. The bar draws nothing if stderr is not a terminal.
pub(crate) fn progress_bytes(total: Option<u64>, what: &'static str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = match total {
        Some(total) => indicatif::ProgressBar::new(total),
        None => indicatif::ProgressBar::new_spinner(),
    };
    bar.set_style(progress_style(ProgressUnit::Bytes, total.is_some()));
    bar.set_message(what);
    bar
}

/// The unit in which a command counts its progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgressUnit {
    Bytes,
    Items,
}

/// Makes a line that shows progress without a total. The line draws nothing if stderr is not a terminal.
pub(crate) fn progress_without_total(unit: ProgressUnit, what: &'static str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new_spinner();
    bar.set_style(progress_style(unit, false));
    bar.set_message(what);
    bar
}

/// The style of a line of progress. With a total, a bar fills what the numbers leave of the terminal's width.
pub(crate) fn progress_style(unit: ProgressUnit, has_total: bool) -> indicatif::ProgressStyle {
    let template = match (unit, has_total) {
        (ProgressUnit::Bytes, true) => "{msg} [{wide_bar}] {percent}% {bytes_per_sec} {eta}",
        (ProgressUnit::Bytes, false) => "{msg} {spinner} {bytes} {bytes_per_sec}",
        (ProgressUnit::Items, true) => "{msg} [{wide_bar}] {pos}/{len} {eta}",
        (ProgressUnit::Items, false) => "{msg} {spinner} {pos}",
    };
    let style = indicatif::ProgressStyle::with_template(template);
    style.unwrap_or_else(|_| indicatif::ProgressStyle::default_spinner()).progress_chars("=> ")
}

/// The advice for an error that came from the disk that holds an image, because it is full; empty for other errors.
pub(crate) fn full_host_advice(text: &str) -> &'static str {
    match text.contains("write of") && text.contains("No space left on device") {
        true => "; the disk that holds the image is full: free space there, then unmount the image and mount it again",
        false => "",
    }
}

/// Locks standard output.
pub(crate) fn stdout() -> Stdout {
    Stdout(io::stdout().lock())
}

/// Standard output. Writing fails if standard output is closed or its reader has gone away.
pub(crate) struct Stdout(io::StdoutLock<'static>);

/// The error of a write to standard output when standard output is a pipe whose reader has ended. For example, `head`
/// ends before it has read everything.
#[derive(Debug)]
struct ReaderGone;

impl std::fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

/// The error for a stream to standard output whose reader has gone away. `main` ends quietly with it.
pub(crate) fn reader_gone() -> anyhow::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, ReaderGone).into()
}

impl Stdout {
    pub(crate) fn is_terminal(&self) -> bool {
        self.0.is_terminal()
    }

    fn answer<T>(done: io::Result<T>) -> io::Result<T> {
        match done {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(io::Error::new(error.kind(), ReaderGone)),
            done => done,
        }
    }
}

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if ubtrfs_device::stdout_was_closed() && !bytes.is_empty() {
            return Err(io::Error::other("it is closed"));
        }
        Self::answer(self.0.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Self::answer(self.0.flush())
    }
}

/// Whether an error means that the reader of standard output went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_it = |error: &io::Error| error.get_ref().is_some_and(|inner| inner.is::<ReaderGone>());
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(is_it))
}

/// Writes all of `text` to stdout, lines and tabs as they are. Other invisible characters are escaped, because some of
/// the text comes from servers of other users.
pub(crate) fn print_out(text: &str) -> anyhow::Result<()> {
    if is_quiet() {
        return Ok(());
    }
    let mut shown = String::with_capacity(text.len());
    for piece in text.split_inclusive(['\n', '\t']) {
        let line = piece.trim_end_matches(['\n', '\t']);
        shown.push_str(&escaped_line(line.as_bytes()));
        shown.push_str(&piece[line.len()..]);
    }
    print_bytes(shown.as_bytes())
}

/// Prints a result as JSON, in several lines.
pub(crate) fn print_json(value: &Value) -> anyhow::Result<()> {
    print_out(&format!("{}\n", json_lines(value)))
}

/// Prints a list as JSON in the form of btrfs-progs, with a header.
pub(crate) fn print_progs_json(name: &str, list: &Value) -> anyhow::Result<()> {
    print_json(&serde_json::json!({ "__header": { "version": "1" }, (name): list }))
}

/// Writes all bytes to stdout, as [`print_out`] does with text.
pub(crate) fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = stdout();
    out.write_all(bytes).and_then(|()| out.flush()).context(OUTPUT_LOST)
}

pub(crate) const OUTPUT_LOST: &str = "cannot write to standard output";
/// Exit status if the reader of standard output has gone away: the status that a shell reports after SIGPIPE.
const NO_READER: u8 = 128 + 13;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_in_btrfs_progs() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("16k"), Ok(16384));
        assert_eq!(parse_size("1G"), Ok(1 << 30));
        assert_eq!(parse_size("2MiB"), Ok(2 << 20));
        assert!(parse_size("G").is_err());
        assert!(parse_size("-1").is_err());
        assert!(parse_size("99999999E").is_err());
        assert_eq!(parse_size("1.5G"), Ok(3 << 29));
        assert_eq!(parse_size("0.25MiB"), Ok(1 << 18));
        assert_eq!(parse_size("7.9E").map(|size| size >> 55), Ok(252));
        for wrong in [
            "1.5",
            ".5G",
            "1.G",
            "1.5.5G",
            "1..5G",
            "8E",
            "8.0E",
            "1.5ib",
            "99999999999999999999999999999999999999999G",
        ] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_full_host_is_told_apart_from_a_full_filesystem() {
        let host = "the commit failed: write of 16384 bytes at 30408704: No space left on device (os error 28)";
        assert!(full_host_advice(host).contains("free space there"));
        assert_eq!(full_host_advice("cannot copy 'f': No space left on device"), "");
    }

    /// A terminal of 80 columns that keeps the text of the last draw.
    #[derive(Clone, Debug, Default)]
    struct Screen(std::sync::Arc<std::sync::Mutex<String>>);

    impl indicatif::TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }

        fn move_cursor_up(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _n: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().clear();
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_progress_fit_into_80_columns() {
        for unit in [ProgressUnit::Bytes, ProgressUnit::Items] {
            let term = Screen::default();
            let target = indicatif::ProgressDrawTarget::term_like(Box::new(term.clone()));
            let bar = indicatif::ProgressBar::with_draw_target(Some(300 << 20), target);
            let bar = bar.with_elapsed(std::time::Duration::from_millis(200));
            bar.set_style(progress_style(unit, true));
            bar.set_message("balance: block group 1372585984, 11 of 12");
            bar.set_position(150 << 20);
            // The rate of a bar that has ended is its position by its elapsed time, however long the test takes.
            bar.abandon();
            let shown = term.0.lock().unwrap().clone();
            let line = shown.trim_end();
            assert!(line.contains("12 [") && line.chars().count() <= 80, "{line}");
            assert_eq!(line.contains("MiB"), unit == ProgressUnit::Bytes, "{line}");
        }
    }

    #[test]
    fn too_little_memory_is_refused_with_the_least() {
        assert_eq!(parse_memory("16M"), Ok(16 << 20));
        for little in ["0", "1", "16383K"] {
            assert!(parse_memory(little).unwrap_err().contains("at least 16M"), "{little}");
        }
    }

    #[test]
    fn sizes_print_as_in_btrfs_progs() {
        assert_eq!(format_size(0), "0.00B");
        assert_eq!(format_size(16384), "16.00KiB");
        assert_eq!(format_size(1 << 30), "1.00GiB");
        assert_eq!(format_size(1_717_986_918), "1.60GiB");
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let error = anyhow::anyhow!("inner\n  text").context("outer");
        assert_eq!(error_line(&error), "ubtrfs: outer: inner text");
        let error = anyhow::Error::from(std::io::Error::from_raw_os_error(5)).context("a (os error 5), b");
        assert_eq!(error_line(&error), "ubtrfs: a, b: Input/output error");
    }
}
