//! The log of a long-running server: stderr in the foreground, syslog in the background.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::OnceLock;

use ubtrfs_format::print::escaped_line;

use crate::common::Shown;
use tracing_subscriber::filter::LevelFilter;

static SYSLOG: OnceLock<UnixDatagram> = OnceLock::new();
/// The image and the mount point, which every message to syslog names.
static MOUNT: OnceLock<String> = OnceLock::new();

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

/// Sends messages to syslog; each names the image and the mount point. Without a running syslog, messages are lost.
pub(crate) fn to_syslog(image: &Path, dir: &Path) {
    let image = std::fs::canonicalize(image).unwrap_or_else(|_| image.to_owned());
    let _ = MOUNT.set(format!("{} on {}", image.shown(), dir.shown()));
    // Connect now, because a confined server cannot connect later.
    if let Ok(socket) = UnixDatagram::unbound()
        && socket.connect("/dev/log").is_ok()
    {
        let _ = SYSLOG.set(socket);
    }
    let _ = tracing_subscriber::fmt()
        .with_max_level(level())
        .with_writer(|| Syslog { line: Vec::new() })
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
}

/// Collects the bytes of one log message, and sends the message when dropped.
struct Syslog {
    line: Vec<u8>,
}

impl Write for Syslog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Syslog {
    fn drop(&mut self) {
        // The number in brackets is 8 times the facility (daemon, 3) plus the severity (error, 3, or warning, 4).
        let text = escaped_line(self.line.trim_ascii());
        let mount = MOUNT.get().map_or("", String::as_str);
        let severity = if text.contains("ERROR") { 3 } else { 4 };
        let message = format!("<{}>ubtrfs[{}]: {mount}: {}", 3 * 8 + severity, std::process::id(), text);
        let sent = SYSLOG.get().is_some_and(|socket| socket.send(message.as_bytes()).is_ok());
        if !sent && let Ok(socket) = UnixDatagram::unbound() {
            let _ = socket.send_to(message.as_bytes(), "/dev/log");
        }
    }
}
