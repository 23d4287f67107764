//! Images on web servers and in object stores, which are only read.
//!
//! Another process of this program reads the object, and serves it by NBD on a socket to the process that opens the image.
//! So a confined server of a mount uses such an image too, although it may make no connections.
//!
//! O1. The process that reads the object ends with the process that uses it: its socket is then closed. It does not wait for
//!     servers that are silent.
//! O2. It first says in one line whether the object was opened: `+`, or `-` and the reason.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use ubtrfs_device::{NbdContent, serve_nbd, set_object_opener};
use ubtrfs_format::print::escaped;
use ubtrfs_remote::RemoteImage;

use crate::common::error_text;

/// Read an object for another process of this program, which has the other end of standard input
#[derive(clap::Args)]
pub(crate) struct ServeArgs {
    url: String,
}

/// Lets this process open images by the URLs of objects.
pub(crate) fn install() {
    set_object_opener(open);
}

/// How long an object may take to be opened.
const PATIENCE: Duration = Duration::from_secs(50);
/// Reads that run at once.
const NR_THREADS: usize = 8;
/// Marks the second of two processes: the first one ends at once, so that nobody has to wait for the second.
const SECOND: &str = "UBTRFS_OBJECT_SERVER";
/// Bytes of the line of O2 at most.
const LINE_MAX: u64 = 4096;

/// The command that reads an object.
fn server_of(url: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
    command.args(["serve-object", "--", url]);
    Ok(command)
}

fn open(url: &str, patience: Duration) -> Result<UnixStream, String> {
    let opened = || -> anyhow::Result<_> {
        let (ours, theirs) = UnixStream::pair().context("cannot make a pair of sockets")?;
        ubtrfs_device::keep_files_from_children();
        let mut command = server_of(url)?;
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().context("cannot start the process that reads the object")?;
        ours.set_read_timeout(Some(patience.max(PATIENCE)))?;
        let mut line = Vec::new();
        // Nothing follows the line before this process sends something.
        std::io::Read::take(BufReader::with_capacity(1, &ours), LINE_MAX).read_until(b'\n', &mut line)?;
        ours.set_read_timeout(None)?;
        Ok((ours, escaped(line.trim_ascii_end())))
    };
    match opened() {
        Ok((socket, line)) if line == "+" => Ok(socket),
        Ok((_, line)) => Err(match line.strip_prefix('-') {
            Some(reason) => reason.to_owned(),
            None => "the process that reads the object ended; try again".to_owned(),
        }),
        Err(error) => Err(error_text(&error)),
    }
}

struct Object(RemoteImage);

impl NbdContent for Object {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, buf).map_err(std::io::Error::other)
    }
}

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    if std::env::var_os(SECOND).is_none() {
        // Ctrl-C at a command on the terminal is not for the server, whose client decides when it ends (O1).
        server_of(&args.url)?.env(SECOND, "1").process_group(0).spawn()?;
        return Ok(ExitCode::SUCCESS);
    }
    let _ = rustix::process::setsid();
    let mut socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    match RemoteImage::open(&args.url) {
        Ok(image) => {
            socket.write_all(b"+\n")?;
            let closed = socket.as_fd().try_clone_to_owned()?;
            std::thread::spawn(move || {
                // Nothing is lost, because objects are only read (O1).
                let mut waited = [PollFd::new(&closed, PollFlags::RDHUP)];
                while !matches!(poll(&mut waited, None), Ok(1..)) {}
                std::process::exit(0);
            });
            // An error means that the client has ended.
            let _ = serve_nbd(&socket, &Object(image), NR_THREADS);
        }
        Err(error) => socket.write_all(format!("-{}\n", error.to_string().replace('\n', " ")).as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}
