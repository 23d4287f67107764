//! [`ReceiveSession`]: a whole input, subvolume after subvolume. Decides which failures end a receive, and whether a
//! subvolume that stays incomplete is deleted or kept.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use ubtrfs_error::start_helper;
use ubtrfs_format::{Generation, RootId};
use ubtrfs_stream::{FrameHeader, Position, StreamCommand, StreamPath, parse};
use ubtrfs_transaction::Job;
use uuid::Uuid;

use super::apply::CurrentSubvolume;
use super::error::{ReceiveError, ReceiveProblem};
use super::incomplete::{MARK_INTERVAL, ReceiveProgress, SentSubvolume};
use super::input::{ApplierRoom, CommandBatch, NR_BATCHES, Room, read_all};
use super::joined::JoinedCommands;
use super::origin::OriginRole;
use super::sharing::Sharing;
use super::store_bytes;
use super::verify::{StreamVerifier, Verified};
use super::walk::entry;
use crate::subvolume::receives::Receiving;
use crate::types::InodeId;
use crate::{Error, Fs};

/// Options for receiving a stream.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// Whether to end at the first end command. Otherwise streams are received until the input ends.
    pub only_first: bool,
    /// The number of failed commands at which the receive fails; 0 means that it continues after any number of them.
    pub max_errors: u64,
    /// Whether a failed receive keeps its subvolume, marked as incomplete, so that a later receive of the same stream
    /// resumes it.
    pub keep: bool,
    /// Whether to delete what a killed receive of the same stream left under the name, and to begin again.
    pub replaces: bool,
    /// Whether to decompress all data, and not to store compressed extents as they are.
    pub force_decompress: bool,
    /// Whether to verify each subvolume before it becomes complete: everything that the stream wrote is read again and
    /// compared.
    pub verify: bool,
    /// Whether to share data with the sent subvolume if this filesystem has it, after comparing the data.
    pub shares: bool,
    /// The receive sets this flag when it ends. A read of the input that waits for bytes must then return.
    pub ended: Arc<AtomicBool>,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        Self {
            only_first: false,
            max_errors: 1,
            keep: false,
            replaces: false,
            force_decompress: false,
            verify: false,
            shares: false,
            ended: Arc::default(),
        }
    }
}

/// The result of a receive.
#[derive(Debug, Default)]
pub struct ReceiveReport {
    /// The subvolumes, in the order of the stream.
    pub subvolumes: Vec<ReceivedSubvolume>,
    /// Commands that were applied or failed. Commands that begin or end a subvolume do not count. Commands that were
    /// skipped, because an earlier receive had applied them, do not count either.
    pub nr_commands: u64,
    /// Bytes of the input.
    pub nr_bytes: u64,
    /// Compressed extents that were stored as they are.
    pub nr_stored_encoded: u64,
    /// Bytes that were shared with the sent subvolumes.
    pub bytes_shared: u64,
    /// Files for which the stream enables fs-verity. The files are received, but fs-verity is not enabled.
    pub nr_without_verity: u64,
    /// Totals of the verification; all are 0 if no verification was requested.
    pub verified: Verified,
    /// Commands that failed. The receive fails when `max_errors` is reached.
    pub nr_errors: u64,
    /// The errors of the first failed commands.
    pub errors: Vec<ReceiveError>,
}

/// A received subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedSubvolume {
    /// The subvolume's id on this filesystem.
    pub id: RootId,
    /// The directory that holds the subvolume's name.
    pub dir: InodeId,
    /// The subvolume's path below the directory of the receive.
    pub path: Vec<u8>,
    /// UUID of the subvolume that was sent.
    pub uuid: Uuid,
    /// Whether the subvolume began as a snapshot of a parent.
    pub is_snapshot: bool,
    /// Commands that an earlier receive had applied.
    pub nr_resumed: u64,
}

impl Fs {
    /// Receives the subvolumes of a stream below `dir`. `job` counts bytes of the input.
    ///
    /// Each completed subvolume stays even if the receive fails later. All completed subvolumes are durable on return.
    /// The incomplete subvolume is deleted or kept as `options` say (R4). `made` is called with each subvolume, new or
    /// resumed.
    ///
    /// # Errors
    ///
    /// Fails with an error of the stream; with the error of the command that reached `options.max_errors`, or after
    /// which no other command can be applied; if a subvolume cannot be begun or completed; if verification finds a
    /// difference; or if `job` is cancelled.
    pub fn receive(
        &self,
        dir: InodeId,
        input: impl Read + Send,
        options: &ReceiveOptions,
        job: &Job,
        made: &mut dyn FnMut(&ReceivedSubvolume),
    ) -> Result<ReceiveReport, ReceiveError> {
        self.inode_to_change(dir)?;
        let mut session = ReceiveSession {
            fs: self,
            job,
            dir,
            options,
            current: None,
            receiving: None,
            sources: HashMap::new(),
            last: None,
            marked: Instant::now(),
            report: ReceiveReport::default(),
            made,
        };
        let done = session.read(input, job);
        let done = session.make_durable(done);
        match done {
            Ok(()) => Ok(session.report),
            Err(error) => Err(session.clean_up(error)),
        }
    }
}

pub(crate) struct ReceiveSession<'s> {
    pub(crate) fs: &'s Fs,
    job: &'s Job,
    dir: InodeId,
    pub(crate) options: &'s ReceiveOptions,
    current: Option<CurrentSubvolume<'s>>,
    /// Registers the current subvolume as one that is being received.
    receiving: Option<Receiving<'s>>,
    /// Clone sources that were found.
    sources: HashMap<(Uuid, u64), RootId>,
    /// The last complete subvolume, and the transaction that makes it durable. This subvolume is often the parent of
    /// the next one.
    last: Option<(Generation, SentSubvolume, RootId)>,
    /// When the current subvolume was marked.
    marked: Instant,
    pub(crate) report: ReceiveReport,
    made: &'s mut dyn FnMut(&ReceivedSubvolume),
}

impl ReceiveSession<'_> {
    fn read(&mut self, input: impl Read + Send, job: &Job) -> Result<(), ReceiveError> {
        let (send, batches) = sync_channel(NR_BATCHES);
        let (give_back, used) = sync_channel(NR_BATCHES);
        let only_first = self.options.only_first;
        let _running = self.fs.streams.begin();
        let room = Room::new(self.fs.streams.part_bytes());
        std::thread::scope(|scope| {
            // Drops before the scope waits for the reader, also after a panic.
            let applier = ApplierRoom(&room);
            let room = &room;
            let reads = start_helper(scope, move || read_all(input, only_first, &send, &used, room));
            let result = loop {
                if !reads.is_thread() {
                    break Err(Error::NoThread.into());
                }
                if let Err(error) = job.check() {
                    break Err(Error::from(error).into());
                }
                match batches.recv_timeout(PATIENCE) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break Ok(()),
                    Ok(Err(error)) => break Err(error.into()),
                    Ok(Ok(mut batch)) => {
                        if let Err(error) = self.apply_batch(&batch, job) {
                            break Err(error);
                        }
                        let len = batch.memory_bytes();
                        batch.clear();
                        applier.give_back(len);
                        // If the channel is full, enough batches are kept for reuse, and this batch is dropped.
                        let _ = give_back.try_send(batch);
                    }
                }
            };
            // The reader thread ends now: sending its next batch fails, and `ended` makes a waiting read of the input
            // return.
            drop(batches);
            drop(applier);
            self.options.ended.store(true, Ordering::SeqCst);
            result
        })
    }

    fn apply_batch(&mut self, batch: &CommandBatch, job: &Job) -> Result<(), ReceiveError> {
        let mut frames = batch.frames();
        for turn in 0_usize.. {
            let Some((header, bytes)) = frames.next() else { break };
            if turn % COMMANDS_PER_CHECK == 0 {
                job.check().map_err(Error::from)?;
                self.refresh_mark()?;
            }
            let command = parse(header, bytes)?;
            match self.step_joined(header, &command, frames.clone())? {
                0 => self.step(header, &command)?,
                nr_joined => drop(frames.by_ref().take(nr_joined).last()),
            }
        }
        let len = batch.len_bytes() as u64;
        self.report.nr_bytes = self.report.nr_bytes.saturating_add(len);
        job.advance(len);
        Ok(())
    }

    /// Marks the current subvolume again if its mark is old (I4 of [`super::incomplete`]).
    fn refresh_mark(&mut self) -> Result<(), ReceiveError> {
        let Some(current) = &self.current else { return Ok(()) };
        if self.marked.elapsed() >= MARK_INTERVAL {
            self.fs.set_mark(current.made.id, &current.sent, None)?;
            self.marked = Instant::now();
        }
        Ok(())
    }

    /// Applies a command together with the frames after it that can be joined with it. Returns the number of these frames; with 0,
    /// nothing was applied.
    fn step_joined<'c>(
        &mut self,
        header: &FrameHeader,
        command: &StreamCommand<'c>,
        rest: impl Iterator<Item = (&'c FrameHeader, &'c [u8])> + Clone,
    ) -> Result<usize, ReceiveError> {
        let Some(current) = &mut self.current else { return Ok(0) };
        if !current.may_join() {
            return Ok(0);
        }
        let Some((joined, nr_joined)) = JoinedCommands::new(header, command, rest.clone()) else { return Ok(0) };
        let shared = current.share_before(self.fs, header.position, command);
        shared.or_else(|error| self.tolerate(error))?;
        let Some(current) = &mut self.current else { return Ok(0) };
        if !current.apply_joined(self.fs, &joined) {
            return Ok(0);
        }
        current.progress.add(header);
        rest.take(nr_joined).for_each(|(header, _)| current.progress.add(header));
        self.report.nr_commands = self.report.nr_commands.saturating_add(1).saturating_add(nr_joined as u64);
        Ok(nr_joined)
    }

    /// Applies a command, or counts its error.
    fn step(&mut self, header: &FrameHeader, command: &StreamCommand<'_>) -> Result<(), ReceiveError> {
        let at = |problem, path: &[u8]| ReceiveError {
            position: Some(header.position),
            path: path.to_vec(),
            problem: Box::new(problem),
        };
        let path = command.path().unwrap_or_default();
        match command {
            StreamCommand::Subvol { path, uuid, ctransid } => {
                self.complete(header.position)?;
                let sent = SentSubvolume { uuid: *uuid, ctransid: *ctransid, parent: None };
                return self.begin(path, sent).map_err(|problem| at(problem, path));
            }
            StreamCommand::Snapshot { path, uuid, ctransid, clone_uuid, clone_ctransid } => {
                self.complete(header.position)?;
                let sent =
                    SentSubvolume { uuid: *uuid, ctransid: *ctransid, parent: Some((*clone_uuid, *clone_ctransid)) };
                return self.begin(path, sent).map_err(|problem| at(problem, path));
            }
            StreamCommand::End => return self.complete(header.position),
            _ => {}
        }
        let no_subvolume = ReceiveProblem::Order("the stream does not begin with a subvolume");
        if self.current.as_ref().is_some_and(|current| current.verifier.as_ref().is_some_and(StreamVerifier::is_full)) {
            self.verify_so_far(header.position)?;
        }
        let Some(current) = &mut self.current else { return Err(at(no_subvolume, path)) };
        // An error of data that waited is the error of earlier commands, so this command is applied nevertheless.
        let shared = current.share_before(self.fs, header.position, command);
        shared.or_else(|error| self.tolerate(error))?;
        let Some(mut current) = self.current.take() else { return Ok(()) };
        let applied = match current.skips(header, command) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let applied = current.apply(self, command);
                if applied.is_ok() {
                    current.progress.add(header);
                }
                self.report.nr_commands = self.report.nr_commands.saturating_add(1);
                applied
            }
            Err(problem) => {
                self.current = Some(current);
                return Err(at(problem, path));
            }
        };
        self.current = Some(current);
        applied.or_else(|problem| self.tolerate(at(problem, path)))
    }

    /// Counts the error of a command. Returns the error if there are too many errors, or if later commands cannot be
    /// applied.
    fn tolerate(&mut self, error: ReceiveError) -> Result<(), ReceiveError> {
        self.report.nr_errors = self.report.nr_errors.saturating_add(1);
        if error.ends_stream() || (self.options.max_errors > 0 && self.report.nr_errors >= self.options.max_errors) {
            return Err(error);
        }
        // A subvolume with failed commands is not kept: a resumed receive would not know which commands failed.
        if let Some(current) = &mut self.current {
            current.has_failures = true;
        }
        if self.report.errors.len() < MOST_ERRORS {
            self.report.errors.push(error);
        }
        Ok(())
    }

    /// Begins a subvolume, or resumes it.
    fn begin(&mut self, path: &[u8], sent: SentSubvolume) -> Result<(), ReceiveProblem> {
        let names_root = ReceiveProblem::Order("the subvolume has no name");
        let (above, name) = StreamPath::new(path)?.split().ok_or(names_root)?;
        let mut dir = self.dir;
        for name in above.names() {
            dir = entry(self.fs, dir, name)?.0;
        }
        if !self.fs.has_room_for_received(sent.uuid)? {
            return Err(ReceiveProblem::TooMany { uuid: sent.uuid });
        }
        let sharing = match self.options.shares {
            true => Sharing::find(self.fs, sent.uuid, sent.ctransid)?,
            false => None,
        };
        self.receiving = None;
        let mut receives = self.fs.subvolumes.receives.lock();
        // An interrupted receive of this name may still be deleting or keeping its subvolume. The name may be free
        // afterwards, or belong to another subvolume.
        while let Ok((id, _)) = self.fs.find_subvolume(dir, name)
            && receives.wait_for_end(id)
        {}
        let resumed = self.fs.resumable(dir, name, &sent, self.options, &receives)?;
        let (id, target) = match resumed {
            Some((id, progress)) => (id, progress),
            None => {
                let parent = match sent.parent {
                    Some(parent) => Some(self.find_parent(parent)?),
                    None => None,
                };
                // The parent does not become writable before its snapshot is made.
                let _kept =
                    self.fs.keep_subvolumes(parent.into_iter()).map_err(|error| match (error, sent.parent) {
                        (Error::NotPermitted(_), Some((uuid, _))) => ReceiveProblem::Writable { uuid },
                        (Error::NotFound, Some((uuid, ctransid))) => ReceiveProblem::NoParent { uuid, ctransid },
                        (error, _) => error.into(),
                    })?;
                (self.fs.make_incomplete(dir, name, &sent, parent)?, ReceiveProgress::default())
            }
        };
        self.receiving = Some(receives.begin(id));
        self.marked = Instant::now();
        let made = ReceivedSubvolume {
            id,
            dir,
            path: path.to_vec(),
            uuid: sent.uuid,
            is_snapshot: sent.parent.is_some(),
            nr_resumed: target.nr_commands,
        };
        (self.made)(&made);
        self.current = Some(CurrentSubvolume::new(
            made,
            name.to_vec(),
            sent,
            target,
            (self.options.verify, sharing),
            store_bytes(self.fs),
        ));
        Ok(())
    }

    /// Compares what the current subvolume holds so far with the stream, if that was requested.
    fn verify_so_far(&mut self, position: Position) -> Result<(), ReceiveError> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let shared = current.share_waiting(self.fs);
        shared.or_else(|error| self.tolerate(error))?;
        let Some(CurrentSubvolume { made, verifier: Some(verifier), .. }) = &mut self.current else { return Ok(()) };
        let done = verifier.verify(self.fs, made.id, self.job).map_err(|problem| ReceiveError {
            position: Some(position),
            path: made.path.clone(),
            problem: Box::new(problem),
        })?;
        *verifier = StreamVerifier::new(store_bytes(self.fs));
        self.report.verified.add(&done);
        Ok(())
    }

    /// Completes the current subvolume, if there is one.
    fn complete(&mut self, position: Position) -> Result<(), ReceiveError> {
        let Some(current) = &mut self.current else { return Ok(()) };
        let shared = current.share_waiting(self.fs);
        shared.or_else(|error| self.tolerate(error))?;
        let Some(current) = &mut self.current else { return Ok(()) };
        let at = |problem| ReceiveError {
            position: Some(position),
            path: current.made.path.clone(),
            problem: Box::new(problem),
        };
        current.check_resumed().map_err(at)?;
        self.verify_so_far(position)?;
        let Some(current) = &mut self.current else { return Ok(()) };
        let at = |problem| ReceiveError {
            position: Some(position),
            path: current.made.path.clone(),
            problem: Box::new(problem),
        };
        let transid = self.fs.complete_received(current.made.id, &current.sent).map_err(|error| at(error.into()))?;
        self.last = Some((transid, current.sent, current.made.id));
        self.receiving = None;
        if let Some(current) = self.current.take() {
            self.report.bytes_shared =
                self.report.bytes_shared.saturating_add(current.sharing.map_or(0, |it| it.len_bytes));
            self.report.subvolumes.push(current.made);
        }
        Ok(())
    }

    /// Makes all complete subvolumes durable. Returns the earlier error, if there was one.
    fn make_durable(&mut self, done: Result<(), ReceiveError>) -> Result<(), ReceiveError> {
        let committed = match self.last.take() {
            Some(_) => self.fs.engine.commit().map_err(|error| Error::from(error).into()),
            None => Ok(()),
        };
        done.and(committed)
    }

    /// The parent of a subvolume that begins.
    fn find_parent(&mut self, (uuid, ctransid): (Uuid, u64)) -> Result<RootId, ReceiveProblem> {
        if let Some((transid, sent, id)) = self.last {
            // The UUID tree does not have the subvolume before the commit. A subvolume that another thread made
            // writable and read-only again may have changed, but each change of the flag commits, so the generation
            // differs then.
            if (sent.uuid, sent.ctransid) == (uuid, ctransid)
                && self.fs.engine.generation() == transid
                && !self.fs.entered.is_deleted(id)
                && self.fs.subvolume(id).is_ok_and(|found| found.is_read_only())
            {
                return Ok(id);
            }
            self.fs.engine.commit().map_err(Error::from)?;
        }
        self.fs.find_origin(uuid, ctransid, OriginRole::Parent)
    }

    /// Deletes or keeps the incomplete subvolume after a failure (R4).
    fn clean_up(&mut self, error: ReceiveError) -> ReceiveError {
        let Some(mut current) = self.current.take() else { return error };
        if let Some(receiving) = &self.receiving {
            receiving.stop();
        }
        let id = current.made.id;
        let keeps = self.options.keep && !current.has_failures;
        if keeps && let Err(unshared) = current.share_waiting(self.fs) {
            tracing::warn!("{unshared}; a resumed receive writes this data again");
        }
        let done = match keeps {
            true => self.fs.keep_incomplete(id, &current.sent, current.reached()),
            false => self.delete_wherever_it_is(id),
        };
        // If somebody deleted the subvolume meanwhile, nothing is left.
        if let Err(left) = done
            && self.fs.subvolume_info(id).is_ok()
        {
            tracing::warn!("the incomplete subvolume '{}' stays: {left}", current.made.path.escape_ascii());
        }
        error
    }

    /// Deletes a subvolume by its present name: it may have been moved during the receive.
    fn delete_wherever_it_is(&self, id: RootId) -> Result<(), Error> {
        let info = self.fs.subvolume_info(id)?;
        let root = info.parent.ok_or(Error::NotFound)?;
        self.fs.delete_subvolume(InodeId { root, ino: info.dirid }, info.name(), Some(id))
    }

    /// The subvolume to clone from.
    pub(crate) fn source(&mut self, uuid: Uuid, ctransid: u64) -> Result<RootId, ReceiveProblem> {
        if let Some(id) = self.sources.get(&(uuid, ctransid)) {
            return Ok(*id);
        }
        let id = self.fs.find_origin(uuid, ctransid, OriginRole::CloneSource)?;
        if self.sources.len() >= MOST_SOURCES {
            self.sources.clear();
        }
        self.sources.insert((uuid, ctransid), id);
        Ok(id)
    }
}

/// Interval of the checks for cancellation while no input arrives.
const PATIENCE: Duration = Duration::from_millis(100);
const COMMANDS_PER_CHECK: usize = 64;
/// Maximum number of errors that a report lists.
const MOST_ERRORS: usize = 100;
/// Maximum number of remembered clone sources.
const MOST_SOURCES: usize = 1024;

#[cfg(test)]
mod tests {
    use ubtrfs_device::{Device, MemoryDevice};
    use ubtrfs_stream::{StreamVersion, StreamWriter};

    use super::*;
    use crate::MountOptions;

    /// A stream of one subvolume, which calls a function before its first byte is read.
    struct Calls<F>(Option<F>, Vec<u8>);

    impl<F: FnOnce()> Read for Calls<F> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            if let Some(call) = self.0.take() {
                call();
            }
            let len = out.len().min(self.1.len());
            out[..len].copy_from_slice(&self.1[..len]);
            self.1.drain(..len);
            Ok(len)
        }
    }

    fn stream(begin: &StreamCommand<'_>) -> Vec<u8> {
        let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V1).unwrap();
        writer.command(begin).unwrap();
        writer.command(&StreamCommand::End).unwrap();
        writer.into_inner()
    }

    #[test]
    fn a_parent_that_another_thread_makes_writable_before_the_commit_is_refused() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let (uuid, next) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let first = stream(&StreamCommand::Subvol { path: b"s0", uuid, ctransid: 7 });
        let (clone_uuid, clone_ctransid) = (uuid, 7);
        let snapshot = StreamCommand::Snapshot { path: b"s1", uuid: next, ctransid: 9, clone_uuid, clone_ctransid };
        // The state of another thread in the middle of `set_subvolume_read_only`, before its commit.
        let makes_writable = || {
            let id = loop {
                let found = fs.lookup(fs.root(), b"s0").map(|found| found.id.root);
                match found.and_then(|id| fs.subvolume(id)) {
                    Ok(found) if found.is_read_only() => break found.id,
                    _ => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            fs.subvolume(id).unwrap().set_read_only(false).unwrap();
        };
        let input = (&first[..]).chain(Calls(Some(makes_writable), stream(&snapshot)));
        let done = fs.receive(fs.root(), input, &ReceiveOptions::default(), &Job::new(), &mut |_| {});
        let error = done.unwrap_err();
        assert!(matches!(*error.problem, ReceiveProblem::Writable { .. }), "{error}");
    }
}
