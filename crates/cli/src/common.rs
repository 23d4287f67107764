//! What all commands share: errors in one line, sizes as btrfs-progs reads and prints them, progress on terminals only.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Parses a size as btrfs-progs does: digits with an optional suffix of K M G T P E (powers of 1024, any case),
/// optionally followed by `iB` or `B`.
#[allow(dead_code, reason = "commands use it as they are added")]
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits_len = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(digits_len);
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a size; write digits and K, M, G, T, P or E"))?;
    let suffix = suffix.to_ascii_lowercase();
    let unit = match suffix.as_str() {
        "ib" => return Err(format!("'{text}' is not a size; write digits and K, M, G, T, P or E")),
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
        _ => return Err(format!("'{text}' is not a size; write digits and K, M, G, T, P or E")),
    };
    number.checked_mul(1u64 << shift).ok_or_else(|| format!("'{text}' is larger than any device"))
}

/// Prints a size as btrfs-progs does: two decimals and KiB, MiB, ...; bytes as `123B`.
#[allow(dead_code, reason = "commands use it as they are added")]
pub(crate) fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    let mut scaled = bytes;
    let mut last = bytes;
    while scaled >= 1024 && unit < UNITS.len() - 1 {
        last = scaled;
        scaled /= 1024;
        unit += 1;
    }
    if unit == 0 {
        return format!("{bytes}.00B");
    }
    format!("{:.2}{}", last as f64 / 1024.0, UNITS[unit])
}

/// One line on stderr, whatever the error's own text holds; exit status 1 (I1 of `main`).
pub(crate) fn print_error(error: &anyhow::Error) -> ExitCode {
    eprintln!("{}", error_line(error));
    ExitCode::FAILURE
}

/// `ubtrfs: outer: inner: ...` in one line.
pub(crate) fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::from("ubtrfs: ");
    let mut previous = String::new();
    for (index, cause) in error.chain().enumerate() {
        let text = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        // Error types that print their source themselves would say it twice.
        if index > 0 && previous.contains(&text) {
            continue;
        }
        if index > 0 {
            line.push_str(": ");
        }
        line.push_str(&text);
        previous = text;
    }
    line
}

/// One line on stderr about something that goes on in spite of it.
pub(crate) fn warn(text: &str) {
    print_err(&format!("ubtrfs: {text}"));
}

/// A line on stderr. One that nobody can read is lost: there is no other place to say so.
pub(crate) fn print_err(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// A usage error of clap in one line; `--help` and `--version` print as they are and succeed.
pub(crate) fn print_usage_error(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::FAILURE
        }
        _ => {
            let text = error.to_string();
            let mut parts: Vec<&str> = Vec::new();
            for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                if line.starts_with("Usage:") || line.starts_with("For more information") {
                    break;
                }
                parts.push(line);
            }
            let what = parts.join(" ");
            eprintln!("ubtrfs: {}; see ubtrfs --help", what.strip_prefix("error: ").unwrap_or(&what));
            ExitCode::FAILURE
        }
    }
}

/// A progress bar over bytes; draws nothing when stderr is not a terminal.
#[allow(dead_code, reason = "commands use it as they are added")]
pub(crate) fn progress_bytes(total: Option<u64>, what: &'static str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = match total {
        Some(total) => indicatif::ProgressBar::new(total),
        None => indicatif::ProgressBar::new_spinner(),
    };
    let template = match total {
        Some(_) => "{msg} [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        None => "{msg} {spinner} {bytes} {bytes_per_sec}",
    };
    if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what);
    bar
}

/// A count that goes down; draws nothing when stderr is not a terminal.
pub(crate) fn progress_left(what: &'static str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new_spinner();
    if let Ok(style) = indicatif::ProgressStyle::with_template("{msg} {spinner} {pos} left") {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

/// Writes all of `text` to stdout; a closed pipe (`| head`) ends the program quietly.
#[allow(dead_code, reason = "commands use it as they are added")]
pub(crate) fn print_out(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

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
    }
}
