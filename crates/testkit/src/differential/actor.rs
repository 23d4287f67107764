//! Users: threads that each have different credentials (D3).

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, capabilities, set_capabilities, set_keep_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

/// Credentials of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Actor {
    /// The user's name in messages.
    pub name: &'static str,
    /// Real user.
    pub ruid: u32,
    /// Effective user.
    pub euid: u32,
    /// Real and effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: &'static [u32],
    /// The capabilities of the thread, independent of the user id. `None` means the capabilities that the user id
    /// implies.
    pub capabilities: Option<CapabilitySet>,
}

impl Actor {
    /// Whether the user has a capability set of its own, independent of the user id.
    pub(crate) fn has_own_capabilities(&self) -> bool {
        self.capabilities.is_some()
    }
}

/// A call that does not return within this time is reported as hanging.
const HANGS_AFTER: Duration = Duration::from_secs(120);

const fn user(name: &'static str, uid: u32, gid: u32, groups: &'static [u32]) -> Actor {
    Actor { name, ruid: uid, euid: uid, gid, groups, capabilities: None }
}

/// The number of users that make random calls: the first users in [`ACTORS`]. The other users act only in scripts.
pub(crate) const NR_DRAWN: usize = 11;

/// All users. The first user is root.
pub const ACTORS: &[Actor] = &[
    user("root", 0, 0, &[]),
    user("owner", 1001, 1001, &[]),
    user("member", 1002, 1002, &[1001, 2000]),
    user("other", 1003, 1003, &[]),
    user("in-group", 1004, 1001, &[]),
    user("owner-with-groups", 1001, 1001, &[1002, 2000]),
    Actor { ruid: 1003, ..user("set-user-id", 1001, 1003, &[2000]) },
    Actor { capabilities: Some(CapabilitySet::empty()), ..user("powerless-root", 0, 0, &[2000]) },
    Actor { capabilities: Some(CapabilitySet::FOWNER), ..user("other-fowner", 1003, 1003, &[]) },
    Actor { capabilities: Some(CapabilitySet::FSETID), ..user("owner-fsetid", 1001, 1001, &[]) },
    Actor {
        // This user has FOWNER, because the sides differ for users without FOWNER: a chown that clears a set-id bit
        // also changes the mode, so Linux's btrfs refuses the chown, but FUSE allows it.
        capabilities: Some(CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::CHOWN).union(CapabilitySet::FOWNER)),
        ..user("other-chown", 1003, 1003, &[])
    },
    Actor {
        capabilities: Some(CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::SYS_ADMIN)),
        ..user("other-admin", 1003, 1003, &[])
    },
];

type Job = Box<dyn FnOnce() + Send>;

/// The threads, one for each user in [`ACTORS`].
pub(crate) struct Threads {
    senders: Vec<Sender<Job>>,
}

impl Threads {
    pub(crate) fn start() -> Result<Self> {
        let mut senders = Vec::new();
        for actor in ACTORS {
            let (sender, jobs) = channel::<Job>();
            let (ready, is_ready) = channel();
            std::thread::Builder::new().name(actor.name.to_owned()).spawn(move || {
                let became = become_actor(actor);
                let failed = became.is_err();
                let _ = ready.send(became);
                if !failed {
                    work(&jobs);
                }
            })?;
            is_ready.recv()?.with_context(|| format!("cannot become {}", actor.name))?;
            senders.push(sender);
        }
        Ok(Self { senders })
    }

    /// Runs a job as a user. Returns an error if the job hangs.
    pub(crate) fn run<T: Send + 'static>(&self, user: usize, job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let (sender, answer) = channel();
        let job = Box::new(move || drop(sender.send(job())));
        let thread = self.senders.get(user).with_context(|| format!("no user {user}"))?;
        thread.send(job).map_err(|_| anyhow!("the thread of user {user} is gone"))?;
        match answer.recv_timeout(HANGS_AFTER) {
            Ok(value) => Ok(value),
            Err(error) => bail!("the call hangs: {error} after {HANGS_AFTER:?}"),
        }
    }
}

fn work(jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        job();
    }
}

fn become_actor(actor: &Actor) -> Result<()> {
    let groups: Vec<Gid> = actor.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    set_thread_groups(&groups).context("groups")?;
    let gid = Gid::from_raw(actor.gid);
    set_thread_res_gid(gid, gid, gid).context("group")?;
    if actor.capabilities.is_some() {
        set_keep_capabilities(true).context("keep capabilities")?;
    }
    let (ruid, euid) = (Uid::from_raw(actor.ruid), Uid::from_raw(actor.euid));
    set_thread_res_uid(ruid, euid, euid).context("user")?;
    if let Some(wanted) = actor.capabilities {
        let mut sets = capabilities(None).context("capabilities")?;
        sets.effective = wanted;
        sets.permitted = wanted;
        sets.inheritable = CapabilitySet::empty();
        set_capabilities(None, sets).context("set capabilities")?;
    }
    Ok(())
}
