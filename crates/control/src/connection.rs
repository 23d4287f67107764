//! The connection to a server: connecting, waiting for answers, and for the end of an unmount.
//!
//! - L5. The server of another user can end no command's memory or patience: the number and the length of its messages,
//!   and the time of its silence, are limited ([`ServerLimits`]). A server of root or of the client's own user is
//!   awaited without limit.
//!
//! [`ServerLimits`]: crate::server_limits::ServerLimits

use std::io;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with};
use ubtrfs_transaction::Job;

use crate::failure::{CommandFailure, Result};
use crate::message::{Request, Response, ServerMessage, decode_answer, encode_request};
use crate::peer::Peers;
use crate::process::stopped_process;
use crate::relay::Heard;
use crate::server_limits::{CANCEL_CHECK_INTERVAL, Limited};
use crate::wire::{ANSWER_MAX, DATA, Wire};

/// Asks the server on this socket to report the end of the unmount; [`await_unmount`] receives the report.
pub fn connect_to_unmount(name: &[u8], peers: &Peers) -> io::Result<UnixStream> {
    connect_to_unmount_within(name, peers, CONNECT_PATIENCE)
}

/// Works like [`connect_to_unmount`]. Fails if the server does not accept the connection within `patience`.
pub fn connect_to_unmount_within(name: &[u8], peers: &Peers, patience: Duration) -> io::Result<UnixStream> {
    let stream = connect_within(name, patience)?;
    peers.check(&stream).map_err(io::Error::other)?;
    let wire = Wire::without_files(stream)?;
    let frame = encode_request(&Request::AwaitUnmount, &[]).map_err(io::Error::other)?;
    wire.send(&frame, &[])?;
    Ok(wire.into_stream())
}

/// Waits for the report that [`connect_to_unmount`] requested: `Ok(None)` if the server's last commit is durable,
/// `Ok(Some(reason))` if that commit failed. Fails if the server ends without a report. With `patience`, fails if the
/// server gives no sign of life for this long, or no report within [`PATIENCE_MAX`] times as long.
pub fn await_unmount(stream: UnixStream, patience: Option<Duration>) -> io::Result<Option<String>> {
    let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "the server ended without an answer");
    let begun = Instant::now();
    let wire = Wire::without_files(stream)?;
    loop {
        let until = patience.map(|patience| (Instant::now() + patience).min(begun + patience * PATIENCE_MAX));
        let received = wire.receive(REPORT_MAX, until).map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => {
                let text = format!("the server did not report its last commit within {} s", begun.elapsed().as_secs());
                io::Error::new(io::ErrorKind::TimedOut, text)
            }
            _ => error,
        });
        let frame = received?.ok_or_else(ended)?;
        match decode_answer(&frame.bytes) {
            Ok(ServerMessage::Done(_)) => return Ok(None),
            Ok(ServerMessage::Failed(failure)) | Err(failure) => return Ok(Some(failure.text)),
            // The server still commits.
            Ok(ServerMessage::Progress(_)) => {}
            Ok(ServerMessage::Ready) => return Err(ended()),
        }
    }
}

/// Connects to a socket.
pub(crate) fn connect(name: &[u8]) -> io::Result<UnixStream> {
    connect_within(name, CONNECT_PATIENCE)
}

pub(crate) fn connect_within(name: &[u8], patience: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let end = Instant::now() + patience;
    loop {
        match connect_to(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            // The listener's queue is full.
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

pub(crate) fn lost(error: io::Error) -> CommandFailure {
    let text = match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            "the mount's server ended before it answered; the command may or may not have been executed".to_owned()
        }
        io::ErrorKind::ConnectionRefused => {
            "the mount's server has ended, or is in another network namespace; if it has ended, unmount it with: ubtrfs umount"
                .to_owned()
        }
        _ => format!("the mount's server does not answer: {error}"),
    };
    CommandFailure::new(Errno::CONNRESET, text)
}

/// The process that made the socket at the other end; `None` if it is in another pid namespace.
pub(crate) fn pid_of(stream: &UnixStream) -> Option<u32> {
    let peer = getsockopt(stream, PeerCredentials).ok()?;
    u32::try_from(peer.pid()).ok().filter(|pid| *pid != 0)
}

/// Waits until this process is not stopped, and fails if it stays stopped.
pub(crate) fn await_continued(pid: Option<u32>) -> Result<()> {
    let end = Instant::now() + STOPPED_PATIENCE;
    while let Some(stopped) = pid.and_then(stopped_process) {
        if Instant::now() >= end {
            return Err(CommandFailure::new(Errno::TIMEDOUT, stopped));
        }
        thread::sleep(RETRY_PAUSE);
    }
    Ok(())
}

/// Receives messages until the result arrives, passes progress on to `job`, and the stream to `heard`. If `server` is
/// given, the command takes no long time, and a stopped server is not waited for.
pub(crate) fn answer_of(
    wire: &Wire,
    job: &Job,
    server: Option<u32>,
    mut limited: Option<Limited<'_>>,
    heard: &mut dyn FnMut(Heard<'_>) -> bool,
) -> Result<Response> {
    let mut has_cancelled = false;
    let mut cancel = || {
        if !std::mem::replace(&mut has_cancelled, true) {
            wire.close_writing();
        }
    };
    let patient_until = Instant::now() + STOPPED_PATIENCE;
    loop {
        if job.progress().is_cancelled {
            cancel();
        }
        let received = match &mut limited {
            Some(limited) => limited.receive(wire)?,
            None => wire.receive_within(ANSWER_MAX, CANCEL_CHECK_INTERVAL),
        };
        let frame = match received {
            Ok(Some(frame)) => frame,
            Ok(None) => return Err(lost(io::ErrorKind::ConnectionReset.into())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= patient_until
                    && let Some(stopped) = server.and_then(stopped_process)
                {
                    return Err(CommandFailure::new(Errno::TIMEDOUT, stopped));
                }
                continue;
            }
            Err(error) => return Err(lost(error)),
        };
        if let Some((&DATA, bytes)) = frame.bytes.split_first() {
            // If the output takes no more, the command is of no use.
            if !heard(Heard::Bytes(bytes)) {
                cancel();
            }
            if let Some(limited) = &mut limited {
                limited.wait_anew();
            }
            continue;
        }
        match decode_answer(&frame.bytes)? {
            ServerMessage::Progress(progress) => {
                let before = job.progress();
                job.add_total(progress.total.saturating_sub(before.total));
                job.advance(progress.done.saturating_sub(before.done));
                if progress.step != before.step {
                    job.set_step(progress.step);
                }
            }
            ServerMessage::Ready => {
                heard(Heard::Ready);
            }
            ServerMessage::Done(response) => return Ok(*response),
            ServerMessage::Failed(failure) => return Err(failure),
        }
    }
}

/// A client gives up connecting after this time. A running server accepts a connection much sooner.
pub(crate) const CONNECT_PATIENCE: Duration = Duration::from_secs(10);
/// The pause before the next attempt to connect if the server has reached a limit of connections.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The greatest length of a report about the last commit.
const REPORT_MAX: usize = 1 << 20;
/// How many times its patience a client waits for the last commit of a server that gives signs of life.
const PATIENCE_MAX: u32 = 12;
/// How long a client waits for a server that is stopped, by SIGSTOP or a debugger.
const STOPPED_PATIENCE: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::message::{ProgressMessage, ServerMessage, encode_answer};
    use crate::relay::ClientSide;
    use crate::server_limits::ServerLimits;

    #[test]
    fn a_server_that_reports_nothing_is_awaited_for_a_limited_time() {
        let (near, _far) = UnixStream::pair().unwrap();
        let error = await_unmount(near, Some(Duration::from_millis(10))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("did not report"), "{error}");
    }

    /// The failure of a command whose server does this, and belongs to another user.
    fn failure_by(limits: ServerLimits, server: impl FnOnce(Wire) + Send) -> CommandFailure {
        let (near, far) = UnixStream::pair().unwrap();
        let (wire, far) = (Wire::without_files(near).unwrap(), Wire::new(far).unwrap());
        thread::scope(|scope| {
            scope.spawn(|| server(far));
            let total = AtomicU64::new(0);
            let limited = Some(Limited::new(limits, ClientSide::None, &total));
            let failure = answer_of(&wire, &Job::new(), None, limited, &mut |_| true).unwrap_err();
            drop(wire);
            failure
        })
    }

    #[test]
    fn a_server_that_gives_signs_of_life_is_awaited_longer() {
        let patience = Duration::from_millis(400);
        let await_by = |server: &(dyn Fn(&Wire, &[u8]) -> bool + Sync)| {
            let (near, far) = UnixStream::pair().unwrap();
            let far = Wire::new(far).unwrap();
            thread::scope(|scope| {
                scope.spawn(move || {
                    let sign = encode_answer(&ServerMessage::Progress(ProgressMessage::default())).unwrap();
                    while server(&far, &sign) {
                        thread::sleep(Duration::from_millis(50));
                    }
                });
                await_unmount(near, Some(patience))
            })
        };
        let begun = Instant::now();
        let done = encode_answer(&ServerMessage::Done(Box::new(Response::Unmounted))).unwrap();
        let commits = |wire: &Wire, sign: &[u8]| match begun.elapsed() < 3 * patience {
            true => wire.send(sign, &[]).is_ok(),
            false => wire.send(&done, &[]).is_err(),
        };
        assert_eq!(await_by(&commits).unwrap(), None);
        let begun = Instant::now();
        let endless = await_by(&|wire, sign| wire.send(sign, &[]).is_ok()).unwrap_err();
        assert_eq!(endless.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < (PATIENCE_MAX + 2) * patience, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_server_of_another_user_has_limits() {
        let patient = ServerLimits::default();
        let hasty = ServerLimits { silence: Duration::from_millis(300), ..ServerLimits::default() };
        let send = |wire: &Wire, bytes: &[u8]| wire.send(bytes, &[]).is_ok();
        let endlessly = |bytes: &'static [u8]| move |wire: Wire| while send(&wire, bytes) {};
        let progress = br#"{"progress":{"done":1,"total":0}}"#;
        for message in [&progress[..], &[DATA], br#""ready""#] {
            for limits in [ServerLimits { nr_messages: 1000, ..patient }, ServerLimits { total: 10_000, ..patient }] {
                let failure = failure_by(limits, endlessly(message));
                assert!(failure.text.contains("without an end"), "L5: {failure}");
            }
        }
        let failure = failure_by(ServerLimits { len: 1000, ..patient }, |wire| assert!(send(&wire, &[b' '; 1001])));
        assert!(failure.text.contains("too long"), "L5: {failure}");
        // Says nothing, until the client has gone.
        let wait = |wire: Wire| {
            while !wire.has_ended() {
                thread::sleep(Duration::from_millis(10));
            }
        };
        let failure = failure_by(hasty, wait);
        assert!(failure.text.contains("nothing complete"), "L5: {failure}");
        // Sends a message byte by byte.
        let failure = failure_by(hasty, |wire| {
            let stream = wire.into_stream();
            let drip = [&100_u32.to_le_bytes()[..], &[b' '; 100]].concat();
            for byte in drip {
                if io::Write::write_all(&mut &stream, &[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        assert!(failure.text.contains("nothing complete"), "L5: {failure}");
    }

    #[test]
    fn a_queue_that_nobody_takes_from_ends_the_attempt() {
        let name = format!("ubtrfs-test-{}", std::process::id()).into_bytes();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let patience = Duration::from_millis(20);
        let mut held = Vec::new();
        let refused = loop {
            match connect_within(&name, patience) {
                Ok(stream) => held.push(stream),
                Err(error) => break error,
            }
            assert!(held.len() < 10_000);
        };
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }
}
