//! The files that a client sends with a request, in the server.
//!
//! A client may send files of another FUSE mount, whose server it controls. Reading the attributes of such a file, and
//! closing it, wait until that server answers, which may be never.
//!
//! - S1. A file that is not known to be the mount's own, or a pipe, is examined and closed by a thread of its own. So it
//!   holds up neither another file, which would keep the mount busy, nor the filesystem (K5 of `server`).
//! - S2. Such a thread counts as a connection of the client's user until its file is closed (K2 of `server`).

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;

use crate::execute::{Host, OpenFile};
use crate::failure::{Failure, Result};

/// Something that is held until a file is closed (S2).
pub(crate) type Slot = Arc<dyn Any + Send + Sync>;

/// Files that arrived and were not examined yet.
#[derive(Default)]
pub(crate) struct Files {
    list: Vec<OwnedFd>,
    slot: Option<Slot>,
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Files").field(&self.list).finish()
    }
}

/// The files of a request: of the mount, and perhaps a pipe.
#[derive(Debug)]
pub(crate) struct Examined {
    pub(crate) opened: Vec<OpenFile>,
    /// Keeps the files open.
    pub(crate) files: Vec<OwnedFd>,
    pub(crate) stream: Option<OwnedFd>,
}

impl Files {
    /// No files yet. Each file that is added later holds `slot` until it is closed.
    pub(crate) fn counted_by(slot: Slot) -> Self {
        Self { list: Vec::new(), slot: Some(slot) }
    }

    pub(crate) fn extend(&mut self, files: impl IntoIterator<Item = OwnedFd>) {
        self.list.extend(files);
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Finds the files in the mount (S1). With `has_stream`, the last file must be a pipe.
    pub(crate) fn examine(mut self, host: &Arc<dyn Host>, has_stream: bool) -> Result<Examined> {
        let list = std::mem::take(&mut self.list);
        let nr_opened = list.len().saturating_sub(usize::from(has_stream));
        let (send, results) = mpsc::sync_channel(list.len());
        let mut found: Vec<Option<(OwnedFd, Option<OpenFile>)>> = list.iter().map(|_| None).collect();
        for (nr, file) in list.into_iter().enumerate() {
            let (host, send, slot) = (Arc::clone(host), send.clone(), self.slot.clone());
            apart(move || {
                let examined = if nr < nr_opened { host.file(file.as_fd()).map(Some) } else { check_pipe(&file) };
                // Sending fails only if nobody waits any more.
                match examined {
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
            let silent =
                |_| Failure::new(Errno::TIMEDOUT, "a file of the command is in a filesystem that does not answer");
            let (nr, file, opened) = results.recv_timeout(left).map_err(silent)??;
            if let Some(place) = found.get_mut(nr) {
                *place = Some((file, opened));
            }
        }
        let mut examined = Examined { opened: Vec::new(), files: Vec::new(), stream: None };
        for (file, opened) in found.into_iter().flatten() {
            match opened {
                Some(opened) => {
                    examined.opened.push(opened);
                    examined.files.push(file);
                }
                None => examined.stream = Some(file),
            }
        }
        Ok(examined)
    }
}

impl Drop for Files {
    /// Closes each file apart (S1).
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

fn check_pipe(file: &OwnedFd) -> Result<Option<OpenFile>> {
    match fstat(file).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::Fifo) => Ok(None),
        _ => Err(Failure::new(Errno::BADF, "the stream of a command must be a pipe")),
    }
}

/// How long the files of a request may take to be examined.
const PATIENCE: Duration = Duration::from_secs(5);
