//! The log of a long-running server: stderr in the foreground, syslog in the background.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;

use ubtrfs_format::print::escaped_line;

use crate::common::{Shown, warn};
use tracing_subscriber::filter::LevelFilter;

static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();
/// The prefix of every syslog message: the image and the mount point, or a description of the background command.
static SUBJECT: OnceLock<String> = OnceLock::new();

/// The log level: the value of `UBTRFS_LOG` (off, error, warn, info, debug, trace), or `warn`.
fn level() -> LevelFilter {
    std::env::var("UBTRFS_LOG").ok().and_then(|text| text.parse().ok()).unwrap_or(LevelFilter::WARN)
}

/// Sends messages to stderr.
pub(crate) fn to_stderr() {
    let _ = tracing_subscriber::fmt()
        .with_max_level(level())
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .without_time()
        .try_init();
}

/// Prints messages as warnings of a command.
pub(crate) fn as_warnings() {
    let _ = tracing_subscriber::fmt()
        .with_max_level(level())
        .with_writer(|| Message::new(warn))
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .with_level(false)
        .try_init();
}

/// Sends messages to syslog; each names the image and the mount point. Without a running syslog, messages are lost.
pub(crate) fn to_syslog(image: &Path, dir: &Path) {
    let image = std::fs::canonicalize(image).unwrap_or_else(|_| image.to_owned());
    let _ = SUBJECT.set(format!("{} on {}", image.shown(), dir.shown()));
    // Connect now, because a confined server cannot connect later.
    if let Ok(socket) = UnixDatagram::unbound()
        && socket.connect("/dev/log").is_ok()
    {
        let _ = SYSLOG.set(socket);
    }
    let _ = tracing_subscriber::fmt()
        .with_max_level(level())
        .with_writer(|| Message::new(send_to_syslog))
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
}

/// Sends a message of a command that goes on in the background to syslog. `work` is what the command does.
pub(crate) fn tell_syslog(work: &str, message: &str) {
    let _ = SUBJECT.set(work.to_owned());
    send(ERROR, &escaped_line(message.as_bytes()));
}

/// Collects the bytes of one log message, and passes the message on when dropped.
struct Message {
    line: Vec<u8>,
    pass_on: fn(&str),
}

impl Message {
    fn new(pass_on: fn(&str)) -> Self {
        Self { line: Vec::new(), pass_on }
    }
}

impl Write for Message {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        (self.pass_on)(&escaped_line(self.line.trim_ascii()));
    }
}

fn send_to_syslog(text: &str) {
    send(if text.contains("ERROR") { ERROR } else { WARNING }, text);
}

fn send(severity: u32, text: &str) {
    let subject = SUBJECT.get().map_or("", String::as_str);
    // The number in brackets is 8 times the facility (daemon, 3) plus the severity.
    let message = format!("<{}>ubtrfs[{}]: {subject}: {text}", 3 * 8 + severity, std::process::id());
    let sent = SYSLOG.get().is_some_and(|socket| socket.send(message.as_bytes()).is_ok());
    if !sent && let Ok(socket) = UnixDatagram::unbound() {
        let _ = socket.send_to(message.as_bytes(), "/dev/log");
    }
}

const ERROR: u32 = 3;
const WARNING: u32 = 4;
