"""Membership of a cluster of nodes without a coordinator: who is in, as a majority of the last view agrees.

nodes       nodes and their lives
jobs        the table of the cluster's jobs, and the commands that change it
job_rules   how the table follows from a change of view
members     views, changes from view to view, and the rule of quorums
overlay     who observes whom, and the tree along which a round travels
messages    what nodes say to each other, what their machine hears and asks for
acceptor    a node's word in the agreement on the next view (Paxos, one decree a view)
rounds      a question that travels down the tree, and the answers that come up merged
word        what a member has to say
reports     who has reported what, and what change follows
tie_break   which half of a view may go on
witness     asking a witness outside of the cluster for that
membership  the view-change machine
local_jobs  the machine of the jobs of one node: what runs there, and when a job's view is entered
one_job     the job that a cluster was made for: who gives it, and when a node is done

and what runs them over real links:

node               a node as its process has it; the cluster's work has a thread of its own
lives, node_life   the lives of a node, and one of them: machine, detector, heartbeats
peer_links         the links to other nodes
cluster_contracts  what nodes say beside `messages`, and the check of all that they say
local_deaths       the kernel's word on nodes of this host
node_state         what a node keeps from life to life
door, admission    finding a member to join by, and what stands against it
node_desk          what commands ask a node (`cluster.node.contracts`); `roll_call` has the answers
job_host           the jobs of one node, with real processes
job_code           whether a host has the code that was submitted
job_output         what ranks print, for whoever follows
"""
