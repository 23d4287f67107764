//! The files of a request, in the server.
//!
//! A client may name files of another FUSE mount, whose server it controls. Reading the attributes of such a file, and
//! closing it, wait until that server answers, which may be never. A process cannot end meanwhile.
//!
//! - S1. The server receives descriptors only from root and its own user, who can stop or end it anyway. A stranger's file
//!   is looked up in /proc by the number that the descriptor has in the stranger's process. That asks no other filesystem.
//! - S2. Each received file is examined and closed by a thread of its own. So it holds up neither another file, which would
//!   keep the mount busy, nor the filesystem (K5 of `server`).
//! - S3. Such a thread counts as a connection of the client's user until its file is closed (K2 of `server`).

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::execute::{Host, OpenFile};
use crate::failure::{CommandFailure, Result};
use crate::process::Processes;
use crate::wire::FILES_MAX;

/// Something that is held until a file is closed (S3).
pub(crate) type FileHold = Arc<dyn Any + Send + Sync>;

/// Files that arrived and were not examined yet.
#[derive(Default)]
pub(crate) struct SentFiles {
    list: Vec<OwnedFd>,
    slot: Option<FileHold>,
}

impl fmt::Debug for SentFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SentFiles").field(&self.list).finish()
    }
}

/// The files of a request, all of the mount.
#[derive(Debug)]
pub(crate) struct Examined {
    pub(crate) opened: Vec<OpenFile>,
    /// Keeps the files open.
    pub(crate) files: Vec<OwnedFd>,
}

impl SentFiles {
    /// No files yet. Each file that is added later holds `slot` until it is closed.
    pub(crate) fn counted_by(slot: FileHold) -> Self {
        Self { list: Vec::new(), slot: Some(slot) }
    }

    pub(crate) fn extend(&mut self, files: impl IntoIterator<Item = OwnedFd>) {
        self.list.extend(files);
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Finds the files in the mount (S2).
    pub(crate) fn examine(mut self, host: &Arc<dyn Host>) -> Result<Examined> {
        let list = std::mem::take(&mut self.list);
        let (send, results) = mpsc::sync_channel(list.len());
        let mut found: Vec<Option<(OwnedFd, OpenFile)>> = list.iter().map(|_| None).collect();
        for (nr, file) in list.into_iter().enumerate() {
            let (host, send, slot) = (Arc::clone(host), send.clone(), self.slot.clone());
            apart(move || {
                // Sending fails only if nobody waits any more.
                match host.file(file.as_fd()) {
                    Ok(opened) => drop(send.send(Ok((nr, file, opened)))),
                    Err(failure) => {
                        let _ = send.send(Err(failure));
                        drop(file);
                    }
                }
                drop(slot);
            });
        }
        drop(send);
        let end = Instant::now() + PATIENCE;
        for _ in 0..found.len() {
            let left = end.saturating_duration_since(Instant::now());
            let silent = |_| {
                CommandFailure::new(Errno::TIMEDOUT, "a file of the command is in a filesystem that does not answer")
            };
            let (nr, file, opened) = results.recv_timeout(left).map_err(silent)??;
            if let Some(place) = found.get_mut(nr) {
                *place = Some((file, opened));
            }
        }
        let (files, opened) = found.into_iter().flatten().unzip();
        Ok(Examined { opened, files })
    }
}

/// Finds the files that a stranger's process has open under these numbers (S1).
pub(crate) fn files_of_stranger(
    host: &dyn Host,
    processes: &dyn Processes,
    numbers: &[u32],
    pid: u32,
    uid: u32,
) -> Result<Vec<OpenFile>> {
    let hidden = || {
        let text =
            "the server sees in /proc neither your process nor its files; root and the user who mounted may do this";
        CommandFailure::new(Errno::PERM, text)
    };
    let find = |number: &u32| host.file_of_process(processes.file_of(pid, *number, Some(uid)).ok_or_else(hidden)?);
    numbers.iter().take(FILES_MAX).map(find).collect()
}

impl Drop for SentFiles {
    /// Closes each file apart (S2).
    fn drop(&mut self) {
        for file in self.list.drain(..) {
            let slot = self.slot.clone();
            apart(move || {
                drop(file);
                drop(slot);
            });
        }
    }
}

/// Does the work in a thread of its own.
fn apart(work: impl FnOnce() + Send + 'static) {
    // If no thread can be started, the work is dropped with everything in it, here.
    let _ = thread::Builder::new().name("control-file".to_owned()).spawn(work);
}

/// How long the files of a request may take to be examined.
const PATIENCE: Duration = Duration::from_secs(5);
