import sys
src=open("scratch_gpu.py").read()
src=src[:src.index('for mode in ("device"')]
exec(src)
import threading, mmap
def rawread(path,size,threads,req=16<<20):
    fd=os.open(path,os.O_RDONLY|os.O_DIRECT); n=size//req
    def r(k):
        b=mmap.mmap(-1,req)
        for i in range(k,n,threads): os.preadv(fd,[b],i*req)
    t=time.perf_counter(); th=[threading.Thread(target=r,args=(k,)) for k in range(threads)]; [x.start() for x in th]; [x.join() for x in th]; dt=time.perf_counter()-t; os.close(fd); return round(n*req/dt/1e9,2)
print("raw 7.26", [(t,round(raw(gb=7.26,threads=t),2)) for t in (4,8)])
for mode,writers in (("device",4),("device",8),("lazy",4)):
    shutil.rmtree(D,ignore_errors=True); print("=====",mode,writers)
    t=time.perf_counter(); ck=laststep.Checkpointer(D,model=m,optimizer=opt,capture=mode,writers=writers); print("construct s",time.perf_counter()-t)
    b=timed(20)[0]; print("iters during registration: median %.1f max %.1f"%(st.median(b)*1e3,max(b)*1e3))
    ck._pool.wait_ready()
    for rep in range(4):
        base=st.median(timed(5)[0])
        ts,hs=timed(6,save_at=(1,),ck=ck,base=rep*100)
        hs[0].wait(); r=hs[0].report
        print("  iter-extra ms:", [round((x-base)*1e3,1) for x in ts], "stall %.1f devcopy %.1f fence %.1f captured %.0f opened %.0f written %.0f durable %.0f ms -> %.2f GB/s"%(r.stall_s*1e3,r.device_copy_s*1e3,r.fence_s*1e3,r.captured_s*1e3,r.opened_s*1e3,r.written_s*1e3,r.durable_s*1e3,r.size_bytes/r.durable_s/1e9))
    print("raw 4/8 now", round(raw(gb=7.26,threads=4),2), round(raw(gb=7.26,threads=8),2))
    pr=cProfile.Profile(); pr.enable(); h=ck.save(999); pr.disable(); h.wait(); pstats.Stats(pr).sort_stats("tottime").print_stats(10)
    ref=[p.detach().clone() for p in m.parameters()]+[s[k].clone() for s in opt.state.values() for k in("exp_avg","exp_avg_sq")]
    h=ck.save(5000); iteration(N); iteration(N); h.wait()
    m2=state()
    for p in m2.parameters(): p.data.zero_()
    o2=torch.optim.AdamW(m2.parameters(),foreach=True)
    ck2=laststep.Checkpointer(D,model=m2,optimizer=o2,writers=writers); ck2._pool.wait_ready()
    os.system("sync; echo 3 > /proc/sys/vm/drop_caches")
    import laststep.checkpointer.restoring as R
    marks=[]
    def wrap(name):
        f=getattr(R,name)
        def g(*a,**k):
            t=time.perf_counter(); x=f(*a,**k); marks.append((name,round((time.perf_counter()-t)*1e3))); return x
        setattr(R,name,g); return f
    olds={n:wrap(n) for n in ("Content","fit","transfer")}
    t=time.perf_counter(); rr=ck2.restore(); torch.cuda.synchronize(); dt=time.perf_counter()-t
    for n,f in olds.items(): setattr(R,n,f)
    got=[p.detach() for p in m2.parameters()]+[s[k] for s in o2.state.values() for k in("exp_avg","exp_avg_sq")]
    print("restore", rr.step, "equal", all(torch.equal(a,b) for a,b in zip(ref,got)), "GB/s", tot/dt/1e9, marks, dt)
    f=f"{D}/{rr.folder}/optimizer.safetensors"; print("raw read", [(t,rawread(f,os.path.getsize(f),t)) for t in (1,4,8,16)])
    ck2.close(); del m2,o2,ck2,got,ref
    ck.close(); torch.cuda.empty_cache()
