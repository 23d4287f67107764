//! [`SendRequest`]: the subvolumes to send and the choice of their parent; and [`Fs::send`].

use std::collections::HashSet;
use std::io::Write;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::RootId;
use ubtrfs_format::print::escaped;
use ubtrfs_stream::{StreamCommand, StreamVersion};
use ubtrfs_transaction::Job;

use super::clones::Clones;
use super::extents::DataOptions;
use super::pipeline::Pipeline;
use super::sender::Sender;
use super::tree::SentTree;
use crate::Fs;
use crate::error::{Error, Result};
use crate::subvolume::sends::{KeptSubvolumes, Sending};
use crate::types::SubvolumeInfo;

/// A request to send one or several subvolumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// Read-only subvolumes, in the order in which they are sent.
    pub subvolumes: Vec<RootId>,
    /// A subvolume that the receiver has. The subvolumes are sent as their differences to the parent.
    pub parent: Option<RootId>,
    /// More subvolumes that the receiver has. Without a parent, the clone source that differs least becomes the parent.
    pub clone_sources: Vec<RootId>,
    /// Version of the stream, 1 or 2.
    pub version: u32,
    /// Send compressed extents in their compressed form; requires version 2.
    pub compressed_data: bool,
    /// Send changed ranges without their data.
    pub no_data: bool,
    /// Send one header and one end for all subvolumes, instead of a header and an end for each subvolume.
    pub joined: bool,
}

impl Fs {
    /// Sends subvolumes into `output`. `job` counts bytes of the stream.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the version is neither 1 nor 2, or if version 1 should carry compressed data;
    /// [`Error::NotPermitted`] if a subvolume is not read-only; [`Error::NoParent`] if clone sources are given and no
    /// source can be the parent; [`Error::Output`] if the output fails; or an error of reading.
    pub fn send(&self, request: &SendRequest, output: &mut (dyn Write + Send), job: &Job) -> Result<()> {
        let version = StreamVersion::from_number(request.version)
            .filter(|version| *version <= StreamVersion::V2)
            .ok_or(Error::InvalidArgument("the version of a send stream is 1 or 2"))?;
        if request.compressed_data && version < StreamVersion::V2 {
            return Err(Error::InvalidArgument("compressed data needs version 2 of the send stream"));
        }
        let used = request.subvolumes.iter().chain(&request.parent).chain(&request.clone_sources);
        let _sending = self.begin_send(used.copied(), job)?;
        let running = self.streams.begin();
        if self.context.read_only().is_none() {
            // A send reads the last commit. Files without names were deleted from a new snapshot after the commit that
            // made it, and a commit of the deletion would change the snapshot during the send. So commit first.
            self.engine.commit()?;
        }
        let nr = request.subvolumes.len();
        let mut clone_sources = request.clone_sources.clone();
        for (index, id) in request.subvolumes.iter().copied().enumerate() {
            let parent = match request.parent {
                Some(parent) => Some(parent),
                None if clone_sources.is_empty() => None,
                None => Some(self.find_parent(id, &clone_sources)?),
            };
            let reads_leaves_ahead = running.reads_leaves_ahead;
            let subvolume = One { id, parent, clone_sources: &clone_sources, version, reads_leaves_ahead };
            let header = !request.joined || index == 0;
            let end = !request.joined || index.saturating_add(1) == nr;
            self.send_one(request, &subvolume, (header, end), output, job)?;
            // With a parent or clone sources, later subvolumes may clone from the subvolume that was just sent. Without
            // a parent, it may become their parent.
            if request.parent.is_some() || !request.clone_sources.is_empty() {
                clone_sources.push(id);
            }
        }
        output.flush().map_err(Error::Output)
    }

    /// Begins a send of subvolumes. A send reads by address, so the call first waits until running moves of extents
    /// have ended, and no move begins before the send ends. Then the call prevents deletion and change of the
    /// subvolumes. [`crate::subvolume::sends`] describes both.
    pub(super) fn begin_send(
        &self,
        ids: impl Iterator<Item = RootId> + Clone,
        job: &Job,
    ) -> Result<(Sending<'_>, KeptSubvolumes<'_>)> {
        let sending = self.subvolumes.sends.begin_send(job)?;
        Ok((sending, self.keep_subvolumes(ids)?))
    }

    fn send_one(
        &self,
        request: &SendRequest,
        what: &One<'_>,
        (header, end): (bool, bool),
        output: &mut (dyn Write + Send),
        job: &Job,
    ) -> Result<()> {
        let new = SentTree::open(self, what.id)?;
        let old = what.parent.map(|id| SentTree::open(self, id)).transpose()?;
        let mut known = HashSet::from([Some(what.id), what.parent]);
        let others = what.clone_sources.iter().filter(|id| known.insert(Some(**id)));
        let others = others.map(|id| SentTree::open(self, *id)).collect::<Result<Vec<_>>>()?;
        let path = self.subvolume_info(what.id)?.path;
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let options = DataOptions { compressed: request.compressed_data, no_data: request.no_data };
        let sent = Pipeline::with((&self.engine, &self.streams), what.version, output, job, |pipeline| {
            if header {
                pipeline.header();
            }
            let (uuid, ctransid) = (new.stream_uuid(), new.item().ctransid.0);
            match &old {
                None => pipeline.command(&StreamCommand::Subvol { path: name, uuid, ctransid })?,
                Some(old) => pipeline.command(&StreamCommand::Snapshot {
                    path: name,
                    uuid,
                    ctransid,
                    clone_uuid: old.stream_uuid(),
                    clone_ctransid: old.item().ctransid.0,
                })?,
            }
            let clones = Clones::new(self, &new, old.iter().chain(&others));
            let sender = Sender::new(self, (old.as_ref(), &new), clones, options, pipeline);
            match what.reads_leaves_ahead {
                true => self.engine.with_walk_source(|source| sender.send(source)),
                false => sender.send(new.source()),
            }
        });
        if !matches!(&sent, Err(Error::Output(_) | Error::Engine(EngineError::Cancelled))) {
            self.check_unchanged(std::iter::once(&new).chain(&old).chain(&others))?;
        }
        sent?;
        if !end {
            return Ok(());
        }
        Pipeline::with((&self.engine, &self.streams), what.version, output, job, |pipeline| {
            pipeline.command(&StreamCommand::End)
        })
    }

    /// Fails if a read-only subvolume was changed after it was opened here: through a file that was open for writing
    /// before the subvolume became read-only, or because such a file without a name was closed. The change freed blocks
    /// and data of the subvolume, so what was read from it may be wrong.
    pub(super) fn check_unchanged<'t>(&self, trees: impl Iterator<Item = &'t SentTree>) -> Result<()> {
        for tree in trees {
            if self.engine.committed_tree(tree.id())?.is_none_or(|now| now.root() != tree.root()) {
                return Err(Error::Busy(
                    "a subvolume was changed through a file that was open before it became read-only; close the file \
                     or send a snapshot",
                ));
            }
        }
        Ok(())
    }

    /// The clone source that probably differs least from a subvolume: of the subvolume's parent and other snapshots of
    /// this parent, the one whose ctransid is closest to the subvolume's.
    fn find_parent(&self, id: RootId, clone_sources: &[RootId]) -> Result<RootId> {
        let info = self.subvolume_info(id)?;
        let sources =
            clone_sources.iter().map(|source| self.subvolume_info(*source)).collect::<Result<Vec<SubvolumeInfo>>>()?;
        let is_related = |source: &&SubvolumeInfo| {
            !info.parent_uuid.is_nil() && (source.uuid == info.parent_uuid || source.parent_uuid == info.parent_uuid)
        };
        let distance = |source: &&SubvolumeInfo| source.ctransid.0.abs_diff(info.ctransid.0);
        let best = sources.iter().filter(|source| source.id != id).filter(is_related).min_by_key(distance);
        best.map(|best| best.id).ok_or_else(|| {
            Error::NoParent(format!(
                "none of the clone sources is a snapshot of the subvolume that '{}' was made of (UUID {}); name a parent \
                 with -p",
                escaped(&info.path),
                info.parent_uuid
            ))
        })
    }
}

/// A subvolume to send.
struct One<'r> {
    id: RootId,
    parent: Option<RootId>,
    clone_sources: &'r [RootId],
    version: StreamVersion,
    reads_leaves_ahead: bool,
}
